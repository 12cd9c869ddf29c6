"""Hooks on PyTorch's own collectives: a communication hook of DDP, and custom communications of FSDP2.

The hooks pass results of collectives (of FSDP2's all-gathers also the inputs) to callbacks, and run some reductions a
second time with the same input. Training continues with the result of the first run.

Note [In step]
All ranks of a group must run a collective twice in the same call. The number of calls decides which call that is. A
check that is off, a step that is not checked, or a guard that has ended on one rank makes no difference, so a model
keeps its hooks until it is deleted. Before they install the first hook, all ranks agree on the models that get one
(`collective_checksums.CollectiveChecksums`).
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

OnResult = Callable[[Tensor, Tensor, dist.ProcessGroup], None]
"""A callback that gets the input and the result of a collective and its group, on the stream of the collective."""


class Reduction:
    """A DDP communication hook that reduces buckets as DDP does without a hook, and one bucket of each backward twice.

    Args:
        model: the DDP model.
        reduced: is called with the number of the backward, the index of the bucket, and the result of the first run; it
            may run on a thread of gloo.
        reduces: is called at the last bucket of each backward, to count reductions.
    """

    def __init__(
        self, model: DistributedDataParallel, reduced: Callable[[int, int, Tensor], None], reduces: Callable[[], None]
    ) -> None:
        self._group, self._reduced, self._reduces = model.process_group, reduced, reduces
        self._factor = 1.0 / model.process_group.size()
        self._backward, self._buckets = 0, 1
        self._again: tuple[int, int, Tensor, dist.Work] | None = None

    def put(self, model: DistributedDataParallel) -> None:
        """Install the hook on the model.

        Raises:
            RuntimeError: the model has a hook already.
        """
        parallel.register_comm_hook(model, self)

    def __call__(self, state: object, bucket: Any) -> torch.futures.Future[Tensor]:
        """Reduce a bucket of DDP (`torch.distributed.GradBucket`); returns a future of the reduced tensor."""
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
        """Waits for the second result of the bucket that was reduced twice, returns it, and clears it.

        Returns:
            (number of the backward, index of the bucket, second result), or None if no bucket was reduced twice since
            the last call.
        """
        again, self._again = self._again, None
        if again is None:
            return None
        again[3].wait()
        return again[:3]


def _all_reduce(content: Tensor, group: Any) -> dist.Work:
    work: dist.Work | None = dist.all_reduce(content, group=group, async_op=True)
    assert work is not None
    return work


def watch_gather(module: FSDPModule, on_result: OnResult) -> bool:
    """Make an FSDP2 module pass the input and the result of each all-gather to a callback.

    Returns:
        Whether that is possible: False if the program has set its own communication for the module's all-gather.
    """
    own = parallel.own_gather(module)
    if own is None:
        return False

    class Gather(type(own)):  # type: ignore[misc]
        """FSDP2's own all-gather, followed by `on_result(input, output, group)` unless the call is asynchronous."""

        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
            work = super().__call__(output_tensor, input_tensor, group, async_op)
            if not async_op:
                on_result(input_tensor, output_tensor, group)
            return work

    module.set_custom_all_gather(Gather())
    return True


@dataclass
class Turns:
    """Decides which calls of a collective run a second time: one in `turns`, see Note [In step].

    Attributes:
        turn: the number of this module among those that take turns, from 0.
        turns: how many modules take turns, the same on all ranks of the group.
        on_result: is called with the first result, the second result and the group.
        calls: the number of calls up to now.
    """

    turn: int
    turns: int
    on_result: OnResult
    calls: int = 0

    def comes(self) -> bool:
        """Whether the next call of the collective is run twice."""
        return (self.calls + 1) % self.turns == self.turn


class Between:
    """An FSDP2 all-reduce hook for HSDP, where an `all_reduce` between replicas follows each `reduce_scatter`.

    FSDP2 calls the hook after the `all_reduce`, whose input is a sum: the result of the `reduce_scatter` just before,
    and the results of earlier ones that no `all_reduce` has followed. FSDP2 adds them in place.

    Args:
        module: the module whose gradients are reduced.
        turns: says which calls are run twice.
        reduced: is called with the number of the call and its result.
    """

    def __init__(self, module: FSDPModule, turns: Turns, reduced: Callable[[int, Tensor], None]) -> None:
        self._module, self._turns, self._reduced = weakref.ref(module), turns, reduced
        self._partial: Tensor | None = None
        self._given: Tensor | None = None

    def scattered(self, output: Tensor) -> None:
        """Receive a result of the `reduce_scatter`; keep a copy if the next `all_reduce` is run twice."""
        if self._turns.comes():
            self._given = output.clone() if self._partial is None else output + self._partial
        if self._partial is None:
            self._partial = output

    def __call__(self, output: Tensor) -> None:
        """Receive a result of the `all_reduce`; if it is this call's turn, repeat the `all_reduce` on the copy."""
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
        self._turns.on_result(output, given, group)


def repeat_reductions(
    module: FSDPModule, scatters: Turns | None, between: Between | None, reduces: Callable[[], None]
) -> None:
    """Make an FSDP2 module reduce its gradients twice in some backwards, and pass both results to callbacks.

    Args:
        module: the module.
        scatters: says which calls of `reduce_scatter` are run twice; None: no call.
        between: the hook after the `all_reduce` of HSDP; None without HSDP.
        reduces: is called in each `reduce_scatter`.
    """
    own = parallel.own_scatter(module)

    class Scatter(type(own)):  # type: ignore[misc]
        """FSDP2's own reduce-scatter, which sometimes runs twice and passes its result to `between`."""

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
                    scatters.on_result(output_tensor, second, group)
            if between is not None and not async_op:
                between.scattered(output_tensor)
            return work

    module.set_custom_reduce_scatter(Scatter())
    if between is not None:
        module.set_all_reduce_hook(between)
