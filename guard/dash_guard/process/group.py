"""Agreement between ranks at a place of training that all of them reach: a process group of the guard's own.

It is made of gloo's connections, whatever the training uses, so that nothing of the guard waits in, or gets in the way
of, a collective of the training; it has no place in the numbering of the program's groups either.  Ranks open it
before the first step of the first optimizer, where their gradients have met already.

Note [No deadlock]
No rank waits for one that never comes.  The last one to arrive, or the first whose patience ends, decides for all in
the store of the job whether there is a group (`upstream.collectives.meet`).  Ranks whose guards have other settings,
and so would wait in other places, decide that there is none.  A rank on which a check ends while others may wait
closes its end (`end`): they get an error at once.  Without a group whatever needs one is switched off, coverage says
so, and training goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch

from dash_inductor.errors import DashError

from ..observation.exchange import Exchange
from ..upstream import collectives

PATIENCE = 60.0
"""Seconds in which all ranks must come to the first step of an optimizer."""

LONG = 5.0
"""Seconds of a wait for others after which they can know of it."""

_TIMEOUT = timedelta(minutes=10)  # that a rank may be late later, for example because it writes a checkpoint
_numbers = itertools.count(1)  # of groups of this process; all ranks count alike


class Group:
    """All ranks of the job, or this rank alone where there is no process group.

    Attributes:
        settings: what all ranks must have set alike.
        meetings: of all ranks, up to now.
    """

    def __init__(self) -> None:
        self.settings, self.meetings = "", 0
        self._exchange = Exchange()
        self._opened, self._ended = False, ""
        self._group: Any = None
        self._board: collectives.Board | None = None
        self._waits: float | None = None  # since then
        self._told = -1  # meetings

    def open(self) -> str:
        """Find all other ranks, once; all ranks call this at the same place.

        Returns:
            Why there is no group, "" if there is one, or none is needed.
        """
        if not self._opened:
            self._opened = True
            if collectives.is_up():
                settings = hashlib.blake2b(self.settings.encode(), digest_size=8).hexdigest()
                found = collectives.meet(next(_numbers), settings, PATIENCE, _TIMEOUT)
                self._group, self._board, self._ended = found
        return self._ended

    def end(self, why: str) -> None:
        """This rank takes part no more: others that wait for it, or will, get an error."""
        if self._group is not None:
            self._group = self._board = None
            collectives.part()
        self._opened, self._ended = True, self._ended or why

    def _alone(self) -> bool:
        """Whether this rank is the only one.

        Raises:
            DashError: there are others, and no group.
        """
        self.open()
        if self._ended:
            raise DashError(self._ended)
        return self._group is None

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers (of 64 bits, with a sign) of all ranks, by rank; all of them give equally many.

        Raises:
            DashError: there is no group; so do the others below.
            RuntimeError: another rank has ended its group, or has died.
        """
        if self._alone():
            return [list(numbers)]
        with self._waiting():
            rows = self._exchange.gather(torch.tensor(numbers, dtype=torch.int64), self._group)
        self.meetings += 1
        return rows.tolist()

    def gather_padded(self, numbers: Sequence[int]) -> list[list[int]]:
        """As `gather`, where ranks may have different counts."""
        counts = [count for (count,) in self.gather([len(numbers)])]
        padded = [*numbers, *[0] * (max(counts) - len(numbers))]
        return [row[:count] for row, count in zip(self.gather(padded), counts, strict=True)]

    def broadcast(self, content: torch.Tensor, source: int) -> torch.Tensor:
        """The content of one rank, uint8 [n] on the CPU, in all of them; others give as many bytes of any value."""
        return content if self._alone() else self._exchange.broadcast(content, source, self._group)

    def highest(self, numbers: Sequence[int]) -> list[int]:
        """The maximum over all ranks of each of the numbers (of 64 bits, with a sign)."""
        if self._alone():
            return list(numbers)
        with self._waiting():
            found = self._exchange.highest(torch.tensor(numbers, dtype=torch.int64), self._group)
        self.meetings += 1
        return found.tolist()

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self._waits = time.monotonic()
        try:
            yield
        finally:
            self._waits = None

    def tell(self) -> None:
        """Let the others know if this rank has waited long in a meeting; from any thread."""
        board, since, meetings = self._board, self._waits, self.meetings
        if board and since is not None and self._told != meetings and time.monotonic() - since > LONG:
            self._told = meetings
            board.write(f"waits {meetings}")

    def others_wait(self) -> bool:
        """Whether another rank has waited long in the next meeting of this one; from any thread."""
        board = self._board
        return board is not None and board.has(f"waits {self.meetings}")

    def close(self) -> None:
        """Wait until no thread of gloo holds what was sent."""
        self._exchange.close()
        self.end("the guard has ended")
