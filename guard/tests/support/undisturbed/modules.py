"""Programs whose modules keep something, run again, or are copied."""

from __future__ import annotations

import collections
import copy
import functools
import io
import itertools
import pickle
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from .hooks import summed
from .training import (
    KINDS,
    OUT,
    SIZE,
    Build,
    Training,
    digest,
    gradients,
    inputs,
    kind,
    loss_of,
    network,
    simple,
    update,
)


class Tied(nn.Module):
    """Two layers with one weight, and a leaf that is no parameter of the module."""

    def __init__(self, outside: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.two.weight = self.one.weight
        self.hidden = [outside]

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x))) * self.hidden[0]


@kind
def shared_parameters_and_others(number: int, world: int) -> Training:
    outside = torch.ones(SIZE, requires_grad=True)
    model = Tied(outside)
    training = simple(number, model)
    training.optimizers.append(torch.optim.SGD([outside], lr=0.1))
    training.more = lambda: [outside, *([] if outside.grad is None else [outside.grad])]
    return training


@kind
def gradients_of_others_that_stay(number: int, world: int) -> Training:
    """A leaf outside of the model gathers gradients over all steps."""
    outside = torch.ones(SIZE, requires_grad=True)
    return simple(number, Tied(outside), more=lambda: [] if outside.grad is None else [outside.grad])


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.reentrant = nn.Linear(SIZE, 17), nn.Linear(17, OUT), reentrant
        self.block = nn.Sequential(nn.Linear(17, 17), nn.GELU(), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.block, self.first(x), use_reentrant=self.reentrant))


@kind
def checkpoints(number: int, world: int) -> Training:
    return simple(number, DistributedDataParallel(Checkpointed(False), gradient_as_bucket_view=True), to_none=False)


@kind
def reentrant_checkpoints(number: int, world: int) -> Training:
    return simple(number, DistributedDataParallel(Checkpointed(True), gradient_as_bucket_view=True), to_none=False)


@kind
def reentrant_checkpoints_of_a_static_graph(number: int, world: int) -> Training:
    model = DistributedDataParallel(Checkpointed(True), gradient_as_bucket_view=True, static_graph=True)
    return simple(number, model, to_none=False)


@kind
def reentrant_checkpoints_with_hooks(number: int, world: int) -> Training:
    return summed(number, Checkpointed(True), to_none=False)


class Keeps(nn.Module):
    """Has state other than buffers: a tensor, a number, a list, and a generator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, OUT)
        self.hidden, self.mean, self.calls = torch.zeros(6, SIZE), torch.zeros(SIZE), 0
        self.kept: list[Tensor] = []
        self.known: dict[str, Tensor] = {}
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        noise = torch.rand(x.shape, generator=self.generator)
        y = torch.tanh(self.layer(x) + 0.3 * self.hidden + self.mean) + 0.01 * noise * self.calls
        self.hidden = y.detach()
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        self.kept.append(y.square().mean())
        self.known["last"] = y.detach()
        return self.last(y)


@kind
def modules_with_state_of_their_own(number: int, world: int) -> Training:
    model = Keeps()

    def step(n: int) -> None:
        result = model(inputs(number, n))
        (loss_of(result) + sum(model.kept)).backward()
        training.seen.append(len(model.kept))
        model.kept.clear()
        update(training)

    training = Training(model, step, [torch.optim.SGD(model.parameters(), lr=0.1)])
    training.more = lambda: [model.hidden, model.mean, *model.kept, *model.known.values(), model.generator.get_state()]
    return training


class Tally:
    """An object of the program that counts."""

    def __init__(self) -> None:
        self.calls = 0
        self.seen: list[int] = []


CALLS = 0
SEEN: list[int] = []
SEENS: tuple[list[int], ...] = ([], [])
COUNTER = torch.zeros(())
COUNTERS = {dtype: torch.zeros((), dtype=dtype) for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool)}
GENERATOR = torch.Generator()
RANDOM = random.Random(5)
TALLY = Tally()
HITS: collections.Counter[str] = collections.Counter()
ARRAY = numpy.zeros(3)
BYTES = bytearray(3)


def count_calls() -> None:
    vars(count_calls)["calls"] += 1


vars(count_calls)["calls"] = 0


class Writes(nn.Module):
    """A module whose forward counts its calls outside of its parameters, and computes with the count.

    Args:
        what: where the count is.
    """

    calls = 0

    def __init__(self, what: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.what, self.own = nn.Linear(SIZE, OUT), what, 0
        self.register_buffer("buffer", torch.zeros(()))
        self.list: list[int] = []
        self.tally = Tally()
        self.handle = io.StringIO() if what == "open file" else None
        self.numpy = numpy.random.default_rng(5) if what == "numpy generator" else None
        self.numbers = itertools.count(1) if what == "iterator" else None
        self.path = Path(tempfile.mkdtemp()) / "calls" if what == "file" else Path()
        self.closure = _counter()

    def forward(self, x: Tensor) -> Tensor:
        writers: dict[str, Callable[[], float | Tensor]] = {
            "attribute": self._attribute, "buffer": self._buffer, "list": self._list, "global": self._global,
            "global list": self._global_list, "global tensor": self._global_tensor, "generator": self._generator,
            "class": self._class, "object": self._object, "closure": self._closure, "file": self._file,
            "open file": self._open_file, "tuple of lists": self._tuple, "counter": self._counter,
            "numpy array": self._array, "bytes": self._bytes, "numpy generator": self._numpy,
            "generator of Python": RANDOM.random, "iterator": self._iterator, "function": self._function,
            **{f"global of {dtype}": functools.partial(self._global_of, dtype) for dtype in COUNTERS},
        }  # fmt: skip
        count = writers[self.what]()
        return self.layer(x) * (1 + 0.1 * count)

    def _attribute(self) -> int:
        self.own += 1
        return self.own

    def _buffer(self) -> Tensor:
        self.buffer.add_(1)
        return self.buffer.clone()

    def _list(self) -> int:
        self.list.append(1)
        return len(self.list)

    def _global(self) -> int:
        global CALLS
        CALLS += 1
        return CALLS

    def _global_list(self) -> int:
        SEEN.append(1)
        return len(SEEN)

    def _global_tensor(self) -> Tensor:
        COUNTER.add_(1)
        return COUNTER.clone()

    def _generator(self) -> Tensor:
        return torch.rand((), generator=GENERATOR)

    def _class(self) -> int:
        Writes.calls += 1
        return Writes.calls

    def _object(self) -> int:
        TALLY.calls += 1
        self.tally.seen.append(1)
        return TALLY.calls + len(self.tally.seen)

    def _closure(self) -> int:
        return self.closure()

    def _tuple(self) -> int:
        SEENS[1].append(1)
        return len(SEENS[1])

    def _counter(self) -> int:
        HITS.update(["call"])
        return HITS["call"]

    def _array(self) -> float:
        ARRAY[1:] += 1
        return float(ARRAY.sum())

    def _bytes(self) -> int:
        BYTES[2] += 1
        return BYTES[2]

    def _function(self) -> int:
        count_calls()
        return vars(count_calls)["calls"]

    def _numpy(self) -> float:
        assert self.numpy is not None
        return self.numpy.random()

    def _iterator(self) -> int:
        assert self.numbers is not None
        return next(self.numbers)

    def _global_of(self, dtype: torch.dtype) -> Tensor:
        counter = COUNTERS[dtype]
        counter.copy_(~counter if dtype == torch.bool else counter + 1)
        return counter.clone()

    def _file(self) -> int:
        with self.path.open("a") as file:
            file.write(".")
        return self.path.stat().st_size

    def _open_file(self) -> int:
        assert self.handle is not None
        self.handle.write(".")
        return len(self.handle.getvalue())


def _counter() -> Callable[[], int]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


def _writes(what: str, compiled: bool = False) -> Build:
    def build(number: int, world: int) -> Training:
        global CALLS
        CALLS, Writes.calls, TALLY.calls = 0, 0, 0
        for seen in (SEEN, *SEENS):
            seen.clear()
        HITS.clear()
        for counter in (COUNTER, *COUNTERS.values()):
            counter.zero_()
        ARRAY[:], BYTES[:] = 0, bytes(3)
        vars(count_calls)["calls"] = 0
        GENERATOR.manual_seed(5)
        RANDOM.seed(5)
        model = Writes(what)
        return simple(number, torch.compile(model, backend="aot_eager") if compiled else model)

    return build


WRITTEN = (
    "attribute", "buffer", "list", "global", "global list", "global tensor", "generator", "class", "object", "closure",
    "file", "open file", "tuple of lists", "counter", "numpy array", "bytes", "numpy generator", "generator of Python",
    "iterator", "function", *(f"global of {dtype}" for dtype in COUNTERS),
)  # fmt: skip
"""What forwards write outside of parameters."""
COMPILED = ("attribute", "buffer", "list", "global", "global list", "global tensor", "global of torch.int64")
for _what in WRITTEN:
    KINDS[f"modules that write: {_what}"] = _writes(_what)
for _what in COMPILED:
    KINDS[f"compiled modules that write: {_what}"] = _writes(_what, compiled=True)


class Learns(nn.Module):
    """Writes a parameter in its forward, by a local learning rule.

    Args:
        by_data: writes through ``parameter.data``, which does not change the parameter's version.
        from_call: the first call that writes.
        alike: writes the same on all ranks.
    """

    def __init__(self, by_data: bool, from_call: int = 1, alike: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.last = nn.Linear(SIZE, SIZE).requires_grad_(False), nn.Linear(SIZE, OUT)
        self.by_data, self.from_call, self.alike, self.calls = by_data, from_call, alike, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.inner(x)
        if self.calls >= self.from_call:
            weight = self.inner.weight.data if self.by_data else self.inner.weight
            with torch.no_grad():
                weight.add_(-weight if self.alike else y.t() @ x / len(x) - 0.1 * weight, alpha=0.01)
        return self.last(y.tanh())


@kind
def modules_that_write_parameters(number: int, world: int) -> Training:
    return simple(number, Learns(False))


@kind
def modules_that_write_parameters_in_ddp(number: int, world: int) -> Training:
    return simple(number, DistributedDataParallel(Learns(False, alike=True)))


@kind
def modules_that_write_parameters_later(number: int, world: int) -> Training:
    return simple(number, Learns(False, from_call=3))


@kind
def modules_that_write_data_of_parameters(number: int, world: int) -> Training:
    return simple(number, Learns(True))


@kind
def spectral_norm(number: int, world: int) -> Training:
    model = network()
    nn.utils.parametrizations.spectral_norm(model[0])
    nn.utils.parametrizations.weight_norm(model[4])
    return simple(number, model)


@kind
def compiled(number: int, world: int) -> Training:
    return simple(number, torch.compile(network(), backend="aot_eager"))


@kind
def compiled_ddp(number: int, world: int) -> Training:
    inside = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    model = torch.compile(inside, backend="aot_eager")
    return simple(number, model, to_none=False)


@kind
def autocast(number: int, world: int) -> Training:
    model = network()

    def step(n: int) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(inputs(number, n)))
        loss.backward()
        update(training)

    training = Training(model, step, [torch.optim.SGD(model.parameters(), lr=0.1)])
    return training


@kind
def scaled_losses(number: int, world: int) -> Training:
    """A scaler of losses, gradients that are clipped, and a step that is skipped."""
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def step(n: int) -> None:
        scaler.scale(loss_of(model(inputs(number, n))) * (float("inf") if n == 2 else 1.0)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        before = gradients(training)
        scaler.step(optimizer)
        scaler.update()
        training.seen.append([a is b for a, b in zip(gradients(training), before, strict=True)])
        training.seen.append(scaler.get_scale())
        optimizer.zero_grad(set_to_none=False)

    training = Training(model, step, [optimizer])
    return training


@kind
def kept_graphs(number: int, world: int) -> Training:
    """Two backwards of one graph, and a penalty of gradients with a graph of its own."""
    model = network()

    def step(n: int) -> None:
        x = inputs(number, n).requires_grad_()
        result = model(x)
        loss_of(result).backward(retain_graph=True)
        result.sum().backward(retain_graph=True)
        (gradient,) = torch.autograd.grad(loss_of(result), x, create_graph=True)
        (gradient.norm() * 0.1).backward()
        update(training)

    training = Training(model, step, [torch.optim.SGD(model.parameters(), lr=0.1)])
    return training


@kind
def two_models(number: int, world: int) -> Training:
    """Two models with an optimizer each, of which one trains against the other."""
    torch.manual_seed(0)
    maker = DistributedDataParallel(nn.Sequential(nn.Linear(SIZE, 9), nn.Tanh(), nn.Linear(9, SIZE)))
    critic = DistributedDataParallel(network(), gradient_as_bucket_view=True, broadcast_buffers=False)
    one, two = torch.optim.Adam(maker.parameters(), lr=0.02), torch.optim.Adam(critic.parameters(), lr=0.02)

    def step(n: int) -> None:
        made = maker(torch.randn(6, SIZE))
        loss = critic(inputs(number, n)).mean() - critic(made.detach()).mean()
        loss.backward()
        two.step()
        two.zero_grad(set_to_none=False)
        critic(made).mean().backward()
        one.step()
        one.zero_grad()

    return Training(nn.ModuleList([maker, critic]), step, [one, two])


@kind
def copies_of_the_model(number: int, world: int) -> Training:
    """An averaged copy, a pickled one, and a whole one that is made between steps."""
    model = network()
    averaged: list[Any] = []

    def after(n: int) -> None:
        if not averaged:
            averaged.append(torch.optim.swa_utils.AveragedModel(model))
        averaged[0].update_parameters(model)
        twin = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model))
        with torch.no_grad():
            training.seen.append(digest([twin.eval()(inputs(number, n)), again.eval()(inputs(number, n))]))

    training = simple(number, model, after=after, more=lambda: list(averaged[0].parameters()) if averaged else [])
    return training


@kind
def copies_of_optimizers(number: int, world: int) -> Training:
    model = network()

    def after(n: int) -> None:
        optimizer = training.optimizers[0]
        state = copy.deepcopy(optimizer.state_dict())
        copy.deepcopy(optimizer)
        optimizer.load_state_dict(state)

    training = simple(number, model, after=after)
    return training
