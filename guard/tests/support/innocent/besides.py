"""Programs in which one rank, or each rank in its own way, does something besides training between its steps.

`BESIDES` has what is done; each is done on rank 0, on rank `ODD`, and by all ranks in their own ways.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .job import ODD, WIDTH, Job, Program, network

Does = Callable[[DistributedDataParallel, torch.Tensor], object]
"""Does something with a model and a batch of this rank; what it changes of the training, it puts back."""


def evaluates(model: DistributedDataParallel, batch: Tensor) -> None:
    model.module.eval()
    with torch.no_grad():
        model.module(batch)
    model.module.train()


def evaluates_in_inference_mode(model: DistributedDataParallel, batch: Tensor) -> None:
    with torch.inference_mode():
        model.module(batch)


def evaluates_under_autocast(model: DistributedDataParallel, batch: Tensor) -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model.module(batch)


def evaluates_another_model(model: DistributedDataParallel, batch: Tensor) -> None:
    with torch.no_grad():
        nn.Linear(WIDTH, 3)(batch)


def looks_at_gradients_of_inputs(model: DistributedDataParallel, batch: Tensor) -> None:
    batch.requires_grad_()
    torch.autograd.grad(model.module(batch).sum(), batch)


def differentiates_without_reduction(model: DistributedDataParallel, batch: Tensor) -> None:
    with model.no_sync():
        model(batch).square().mean().backward()
    model.zero_grad()


def tunes_a_copy(model: DistributedDataParallel, batch: Tensor) -> None:
    copied = copy.deepcopy(model.module)
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
    copied(batch).square().mean().backward()
    optimizer.step()


def reads_weights(model: DistributedDataParallel, batch: Tensor) -> None:
    for parameter in model.module.parameters():
        parameter.detach().numpy().sum()


def writes_a_checkpoint(model: DistributedDataParallel, batch: Tensor) -> None:
    torch.save(model.module.state_dict(), io.BytesIO())


def loads_its_own_weights(model: DistributedDataParallel, batch: Tensor) -> None:
    model.module.load_state_dict(copy.deepcopy(model.module.state_dict()))


def reads_a_checkpoint_back(model: DistributedDataParallel, batch: Tensor) -> None:
    file = io.BytesIO()
    torch.save(model.module.state_dict(), file)
    file.seek(0)
    model.module.load_state_dict(torch.load(file), assign=False)


def draws_random_numbers(model: DistributedDataParallel, batch: Tensor) -> None:
    torch.rand(7)
    batch.normal_()


def freezes_and_thaws(model: DistributedDataParallel, batch: Tensor) -> None:
    model.module[0].requires_grad_(False)
    evaluates(model, batch)
    model.module[0].requires_grad_(True)


def hooks_a_module(model: DistributedDataParallel, batch: Tensor) -> None:
    seen: list[Tensor] = []
    handle = model.module[0].register_forward_hook(lambda module, args, result: seen.append(result.detach()))
    evaluates(model, batch)
    handle.remove()


def moves_to_another_dtype_and_back(model: DistributedDataParallel, batch: Tensor) -> None:
    with torch.no_grad():
        copy.deepcopy(model.module).double()(batch.double())


def counts_objects(model: DistributedDataParallel, batch: Tensor) -> None:
    gc.collect()
    len(gc.get_objects())


def works_in_a_thread(model: DistributedDataParallel, batch: Tensor) -> None:
    thread = threading.Thread(target=evaluates, args=(model, batch))
    thread.start()
    thread.join()


def fails_and_goes_on(model: DistributedDataParallel, batch: Tensor) -> None:
    with contextlib.suppress(RuntimeError), torch.no_grad():
        model.module(batch[:, :3])


def keeps_weights(model: DistributedDataParallel, batch: Tensor) -> None:
    KEPT.append([parameter.detach().clone() for parameter in model.parameters()])


KEPT: list[list[Tensor]] = []

BESIDES: dict[str, Does] = {
    function.__name__.replace("_", " "): function
    for function in (
        evaluates, evaluates_in_inference_mode, evaluates_under_autocast, evaluates_another_model,
        looks_at_gradients_of_inputs, differentiates_without_reduction, tunes_a_copy, reads_weights,
        writes_a_checkpoint, loads_its_own_weights, reads_a_checkpoint_back, draws_random_numbers, freezes_and_thaws,
        hooks_a_module, moves_to_another_dtype_and_back, counts_objects, works_in_a_thread, fails_and_goes_on,
        keeps_weights,
    )
}  # fmt: skip

RANKS: dict[str, Sequence[int] | None] = {"rank 0": (0,), "one rank": (ODD,), "all ranks": None}


def besides(does: Does, ranks: Sequence[int] | None, job: Job) -> None:
    """Train, and do something else after every second step; ranks None: all do, the higher ones more often."""
    model = DistributedDataParallel(network(nn.BatchNorm1d(WIDTH)))

    def between(step: int) -> None:
        often = 1 if ranks is not None else 1 + job.number
        for turn in range(often if step % 2 == 0 and (ranks is None or job.number in ranks) else 0):
            does(model, job.batch(step, 1 + turn))

    job.train(model, between)
    KEPT.clear()


class Codes(nn.Module):
    """A layer whose frozen weight follows what this rank computes: in its forward, or when `follow` is called."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.layer, self.inside = nn.Linear(WIDTH, WIDTH).requires_grad_(False), inside

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.layer(x.detach())
        if self.inside:
            self.follow(x)
        return y

    @torch.no_grad()
    def follow(self, x: Tensor) -> None:
        self.layer.weight.lerp_(x.T @ x / len(x), 0.01)


def frozen(inside: bool, first: int, job: Job) -> None:
    """Frozen weights are written otherwise on each rank from a step on, in the forward or between steps."""
    codes = Codes(inside and first == 1)
    model = DistributedDataParallel(network(codes))

    def between(step: int) -> None:
        codes.inside = inside and step >= first
        if not inside and step >= first:
            codes.follow(job.batch(step))

    job.train(model, between)


def joined(job: Job) -> None:
    """Ranks have different numbers of batches, and train in DDP's `join`."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    with model.join():
        for step in range(1, 5 + job.number):
            model(job.batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            job.has_trained(model)
    job.meet()


PROGRAMS: dict[str, Program] = {
    **{
        f"{what}: {who}": functools.partial(besides, does, ranks)
        for what, does in BESIDES.items()
        for who, ranks in RANKS.items()
    },
    **{
        f"frozen weights are written {'in the forward' if inside else 'between steps'} from step {first}": (
            functools.partial(frozen, inside, first)
        )
        for inside in (True, False)
        for first in (1, 4)
    },
    "join": joined,
}
