"""PyTorch's own collectives of DDP and FSDP2, with a door: a hook of DDP, and the custom communications of FSDP.

What goes in and what comes out is shown to somebody, and one collective of each backward is run twice with the same
input.  The result of the first run is what training goes on with.

Note [In step]
A collective that is run twice needs all ranks of its group.  So whether it is run again depends on the number of
calls alone, and never on a check that is off, a step that is not looked at, or a guard that has ended on a rank: a
model keeps its door until it ends.  Before the first one, all ranks agree on the models that get one (`wires.Wires`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ...upstream import parallel

Told = Callable[[Tensor, Tensor, dist.ProcessGroup], None]
"""Gets the input and the result of a collective in the order of the stream that it runs on."""


class Reduction:
    """What DDP does with a bucket if it has no hook, and one bucket of each backward a second time.

    Args:
        model: whose buckets these are.
        reduced: gets the number of the backward and of the bucket, and a result; perhaps on a thread of gloo.
    """

    def __init__(self, model: DistributedDataParallel, reduced: Callable[[int, int, Tensor], None]) -> None:
        self._group, self._reduced = model.process_group, reduced
        self._factor = 1.0 / model.process_group.size()
        self._backward, self._buckets = 0, 1
        self._again: tuple[int, int, Tensor, dist.Work] | None = None

    def put(self, model: DistributedDataParallel) -> None:
        """Reduce its buckets from now on."""
        parallel.register_comm_hook(model, self)

    def __call__(self, state: object, bucket: Any) -> torch.futures.Future[Tensor]:
        """Reduce a bucket."""
        content, place = bucket.buffer(), (self._backward, bucket.index())
        content.mul_(self._factor)  # DDP multiplies while it copies into the bucket, and only without a hook
        again = bucket.index() == self._backward % self._buckets
        copy = content.clone() if again else content
        future = _all_reduce(content, self._group).get_future()
        if again:
            self._again = (*place, copy, _all_reduce(copy, self._group))
        if bucket.is_last():
            self._backward, self._buckets = self._backward + 1, bucket.index() + 1
        return future.then(lambda done: self._done(place, done.value()[0]))

    def _done(self, place: tuple[int, int], result: Tensor) -> Tensor:
        self._reduced(*place, result)
        return result

    def second(self) -> tuple[int, int, Tensor] | None:
        """The bucket that was reduced again since the last call, by backward and number, and what came of it."""
        again, self._again = self._again, None
        if again is None:
            return None
        again[3].wait()
        return again[:3]


def _all_reduce(content: Tensor, group: Any) -> dist.Work:
    work: dist.Work | None = dist.all_reduce(content, group=group, async_op=True)
    assert work is not None
    return work


def watch_gather(module: FSDPModule, told: Told) -> bool:
    """Show what a module of FSDP gathers; whether it gathers in PyTorch's own way, which can be watched."""
    own = parallel.own_gather(module)
    if own is None:
        return False

    class Gather(type(own)):  # type: ignore[misc]
        """PyTorch's own."""

        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
            work = super().__call__(output_tensor, input_tensor, group, async_op)
            if not async_op:
                told(input_tensor, output_tensor, group)
            return work

    module.set_custom_all_gather(Gather())
    return True


def repeat_scatter(module: FSDPModule, turn: int, turns: int, told: Told) -> None:
    """Let a module of FSDP reduce its gradients twice in one of `turns` backwards, and show both results."""
    own = parallel.own_scatter(module)

    class Scatter(type(own)):  # type: ignore[misc]
        """PyTorch's own."""

        calls = 0

        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
        ) -> Any:
            work = super().__call__(output_tensor, input_tensor, group, op, async_op)
            self.calls += 1
            if self.calls % turns == turn and not async_op:
                second = torch.empty_like(output_tensor)
                super().__call__(second, input_tensor, group, op)
                told(output_tensor, second, group)
            return work

    module.set_custom_reduce_scatter(Scatter())
