"""PyTorch's own collectives of DDP and FSDP2, with a door: a hook of DDP, and the custom communications of FSDP.

What goes in and what comes out is shown to somebody, and one collective of each backward is run twice with the same
input.  The result of the first run is what training goes on with.

Note [In step]
A collective that is run twice needs all ranks of its group.  So whether it is run again depends on the number of
calls alone, and never on a check that is off, a step that is not looked at, or a guard that has ended on a rank: a
model keeps its door until it ends.  Before the first one, all ranks agree on the models that get one (`wires.Wires`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ..upstream import parallel

Told = Callable[[Tensor, Tensor, dist.ProcessGroup], None]
"""Gets the input and the result of a collective in the order of the stream that it runs on."""


class Reduction:
    """What DDP does with a bucket if it has no hook, and one bucket of each backward a second time.

    Args:
        model: whose buckets these are.
        reduced: gets the number of the backward and of the bucket, and a result; perhaps on a thread of gloo.
        reduces: is called once in each backward.
    """

    def __init__(
        self, model: DistributedDataParallel, reduced: Callable[[int, int, Tensor], None], reduces: Callable[[], None]
    ) -> None:
        self._group, self._reduced, self._reduces = model.process_group, reduced, reduces
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
            self._reduces()
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


@dataclass
class Turns:
    """Which calls of a collective are run a second time: one of `turns`, by their number; see Note [In step].

    Attributes:
        turn: of this module, from 0.
        turns: modules that take turns, the same on all ranks of the group.
        told: gets both results.
        calls: up to now.
    """

    turn: int
    turns: int
    told: Told
    calls: int = 0

    def comes(self) -> bool:
        """Whether the next call is run again."""
        return (self.calls + 1) % self.turns == self.turn


class Between:
    """The `all_reduce` of HSDP between groups of shards, which follows the `reduce_scatter` within one.

    FSDP2 calls a hook behind it.  What went in is known from before: what was scattered, and what has been scattered
    before without an `all_reduce`, to which FSDP2 adds in place.

    Args:
        module: whose gradients these are.
        turns: of its `all_reduce`.
        reduced: gets the number of the call and its result.
    """

    def __init__(self, module: FSDPModule, turns: Turns, reduced: Callable[[int, Tensor], None]) -> None:
        self._module, self._turns, self._reduced = weakref.ref(module), turns, reduced
        self._partial: Tensor | None = None
        self._given: Tensor | None = None

    def scattered(self, output: Tensor) -> None:
        """This was scattered just now."""
        if self._turns.comes():
            self._given = output.clone() if self._partial is None else output + self._partial
        if self._partial is None:
            self._partial = output

    def __call__(self, output: Tensor) -> None:
        """This has come out of the `all_reduce`."""
        given, self._given, self._partial = self._given, None, None
        self._turns.calls += 1
        self._reduced(self._turns.calls, output)
        module = self._module()
        if given is None or module is None:
            return
        group = parallel.reduce_group(module)
        assert group is not None
        if given.is_cuda:  # it is from the stream of the `reduce_scatter`
            given.record_stream(torch.cuda.current_stream(given.device))
        dist.all_reduce(given, group=group, op=parallel.reduce_op(module, given.dtype, given.device))
        self._turns.told(output, given, group)


def repeat_reductions(
    module: FSDPModule, scatters: Turns | None, between: Between | None, reduces: Callable[[], None]
) -> None:
    """Let a module of FSDP reduce its gradients twice in some backwards, and show both results.

    Args:
        module: the module.
        scatters: when its `reduce_scatter` is run again; None: never.
        between: what is behind it with HSDP.
        reduces: is called by each `reduce_scatter`.
    """
    own = parallel.own_scatter(module)

    class Scatter(type(own)):  # type: ignore[misc]
        """PyTorch's own."""

        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
        ) -> Any:
            reduces()
            work = super().__call__(output_tensor, input_tensor, group, op, async_op)
            if scatters is not None:
                again = scatters.comes() and not async_op
                scatters.calls += 1
                if again:
                    second = torch.empty_like(output_tensor)
                    super().__call__(second, input_tensor, group, op)
                    scatters.told(output_tensor, second, group)
            if between is not None and not async_op:
                between.scattered(output_tensor)
            return work

    module.set_custom_reduce_scatter(Scatter())
    if between is not None:
        module.set_all_reduce_hook(between)
