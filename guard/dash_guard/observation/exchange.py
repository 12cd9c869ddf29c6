"""Collectives over the ranks of a process group, which keep tensors alive until the process can exit safely.

Gloo works on threads of its own. Such a thread releases the tensors of a collective some time after all waiting threads
have gone on, and takes the interpreter lock for that, because Python knows these tensors. If the interpreter is being
finalized by then, CPython ends the thread at a place where C++ aborts the process: "terminate called without an active
exception", https://github.com/pytorch/pytorch/issues/190489. A program that ends soon after its last step would run
into that, so a recording ends only when gloo has released all tensors.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dash_inductor.upstream.tensors import use_count

log = logging.getLogger("dash_guard")

_PATIENCE = 10.0  # seconds; a thread that gets a core lets go at once


class Exchange:
    """Runs collectives, and keeps references to tensors that a process group may still hold."""

    def __init__(self) -> None:
        self._lent: list[Tensor] = []

    def gather(self, lanes: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Gather the lanes of all ranks, in group order; all ranks of the group call this.

        Returns:
            int64 [ranks, *lanes.shape].
        """
        everyone = [torch.empty_like(lanes) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, lanes, group)
        gathered = torch.stack(everyone)
        self._lent += [lanes, *everyone]
        del lanes, everyone
        self._keep_held()
        return gathered

    def broadcast(self, content: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
        """Send the content of rank `source` of the group to all ranks; all ranks of the group call this.

        Returns:
            The content of `source`; on other ranks, `content` only gives its shape and dtype.
        """
        sent, options = content.clone(), dist.BroadcastOptions()
        options.rootRank = source
        group.broadcast([sent], options).wait()
        return self._copy(sent)

    def highest(self, numbers: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The maximum of each number over the ranks of the group; all of these ranks call this."""
        sent = numbers.clone()
        dist.all_reduce(sent, dist.ReduceOp.MAX, group)
        return self._copy(sent)

    def _copy(self, lent: Tensor) -> Tensor:
        copy = lent.clone()
        self._lent.append(lent)
        del lent
        self._keep_held()
        return copy

    def close(self) -> None:
        """Wait until no process group holds a tensor that was sent; after ten seconds, warn instead."""
        deadline = time.monotonic() + _PATIENCE
        while self._lent and time.monotonic() < deadline:
            time.sleep(0.001)  # without the interpreter's lock
            self._keep_held()
        if self._lent:
            log.warning(
                "fingerprints of a recording were exchanged, and %g seconds later a process group still holds tensors "
                "of this exchange (%d of them): this process may abort while it ends",
                _PATIENCE,
                len(self._lent),
            )

    def _keep_held(self) -> None:
        lent = self._lent
        self._lent = []  # so that the list below is the only place of a tensor
        held = [counts != _FREE for counts in _counts(lent)]
        self._lent = [tensor for tensor, is_held in zip(lent, held, strict=True) if is_held]


def _counts(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """References of C++ and of Python to tensors.

    A tensor that C++ holds has one more of the former; newer versions of PyTorch drop one of the latter, under the
    interpreter's lock, after that is gone.
    """
    return [(use_count(tensor), sys.getrefcount(tensor)) for tensor in tensors]


_FREE = _counts([torch.empty(0)])[0]  # only the list holds this tensor
