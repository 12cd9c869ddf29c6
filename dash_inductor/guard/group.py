"""Agreement between ranks at a place of training that all of them reach: a process group of the guard's own.

It is made of gloo's connections, whatever the training uses, so that nothing of the guard waits in, or gets in the way
of, a collective of the training.  All ranks make it at the same place, the first optimizer's first step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ..observers.exchange import Exchange

_TIMEOUT = timedelta(minutes=10)  # that a rank may be late, for example because it writes a checkpoint


class Group:
    """All ranks of the job, or this rank alone where there is no process group."""

    def __init__(self) -> None:
        self._exchange = Exchange()

    @functools.cached_property
    def _group(self) -> dist.ProcessGroup | None:
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return None
        made: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        return made

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers (of 64 bits, with a sign) of all ranks, by rank; all of them give equally many."""
        if self._group is None:
            return [list(numbers)]
        rows: list[list[int]] = self._exchange.gather(torch.tensor(numbers, dtype=torch.int64), self._group).tolist()
        return rows

    def gather_padded(self, numbers: Sequence[int]) -> list[list[int]]:
        """As `gather`, where ranks may have different counts."""
        counts = [count for (count,) in self.gather([len(numbers)])]
        padded = [*numbers, *[0] * (max(counts) - len(numbers))]
        return [row[:count] for row, count in zip(self.gather(padded), counts, strict=True)]

    def broadcast(self, content: torch.Tensor, source: int) -> torch.Tensor:
        """The content of one rank, uint8 [n] on the CPU, in all of them; others give as many bytes of any value."""
        return content if self._group is None else self._exchange.broadcast(content, source, self._group)

    def highest(self, numbers: Sequence[int]) -> list[int]:
        """The maximum over all ranks of each of the numbers (of 64 bits, with a sign)."""
        if self._group is None:
            return list(numbers)
        found: list[int] = self._exchange.highest(torch.tensor(numbers, dtype=torch.int64), self._group).tolist()
        return found

    def close(self) -> None:
        """Wait until no thread of gloo holds what was sent."""
        self._exchange.close()
