"""Agreement between ranks at a place of the training that all of them reach: a process group of the guard's own.

The group uses connections of gloo, whatever the training uses. So nothing of the guard waits in, or delays, a
collective of the training, and the group has no place in the numbering of the program's groups. Ranks open it before
the first step of the first optimizer, where their gradients have been reduced already, or at a later step (`TRIES`).

Note [No deadlock]
No rank waits for a rank that never comes. The last rank to arrive, or the first one whose patience ends, decides for
all ranks in the store of the job whether there is a group (`upstream.collectives.meet`). Ranks that have waited in vain
train on and try again at the same later steps. Ranks whose guards have other settings, and so would wait at other
places, decide that there is none. A rank on which a check ends while others may wait closes its end (`end`), and the
others get an error at once. Without a group, the checks that need one are switched off, coverage records it, and
training goes on.
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

PATIENCE = 1.5
"""Seconds in which all ranks must arrive at the first step of an optimizer."""

SHORT_PATIENCE = 0.05
"""The same for later steps at which ranks try again, in seconds."""

TRIES = 10
"""How often ranks try again: at steps 2, 4, 8, ..., 64, 128, 192, ...  So all waiting together takes 2 s."""

NOT_ALL = "not all ranks have a guard"

LONG = 5.0
"""Seconds of waiting after which a rank lets the others know."""

_APART = 64  # steps between the later tries
_TIMEOUT = timedelta(minutes=10)  # a rank may be this late later, for example because it writes a checkpoint
_numbers = itertools.count(1)  # of groups of this process; all ranks count alike


class Group:
    """The guard's process group of all ranks of the job, or this rank alone if the program has no process group.

    Attributes:
        settings: a text that must be equal on all ranks.
        meetings: the number of exchanges among all ranks up to now.
    """

    def __init__(self) -> None:
        self.settings, self.meetings = "", 0
        self._exchange = Exchange()
        self._opened, self._ended = False, ""
        self._number = self._tries = 0
        self._tried = -1  # the step of the last try
        self._group: Any = None
        self._board: collectives.Board | None = None
        self._waits: float | None = None  # since then
        self._reported = -1  # meetings

    def open(self, step: int = 0) -> str | None:
        """Connect to all other ranks, once; all ranks call this at the same places.

        Args:
            step: the number of the training step.

        Returns:
            Why there is no group; "" if there is one, or none is needed; None if not all ranks have come, and they can
            try again at a later step.
        """
        if self._opened or not self._tries_at(step):
            return self._ended if self._opened else None
        patience = PATIENCE if self._tries == 0 else SHORT_PATIENCE
        if self._tries == 0:
            self._number = next(_numbers)
        self._tries, self._tried = self._tries + 1, step
        self._opened = True
        if collectives.is_up():
            settings = hashlib.blake2b(self.settings.encode(), digest_size=8).hexdigest()
            try:
                found = collectives.meet(f"{self._number}/{step}", settings, patience, _TIMEOUT)
                self._group, self._board, self._ended = found
            except collectives.NotAllCame:
                if self._tries <= TRIES:
                    self._opened = False
                    return None
                self._ended = NOT_ALL
        return self._ended

    def _tries_at(self, step: int) -> bool:
        is_power = step & (step - 1) == 0
        return self._tries == 0 or (step > self._tried and (is_power or step % _APART == 0))

    def end(self, why: str) -> None:
        """Leave the group: other ranks that wait for this rank, now or later, get an error.

        Args:
            why: the reason, for the coverage.
        """
        if self._group is not None:
            self._group = self._board = None
            collectives.part()
        self._opened, self._ended = True, self._ended or why

    def _alone(self) -> bool:
        """Whether this rank is the only one.

        Raises:
            DashError: there are other ranks, but no group.
        """
        if why := NOT_ALL if self.open() is None else self._ended:
            raise DashError(why)
        return self._group is None

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gather signed 64-bit numbers from all ranks; all ranks give equally many.

        Returns:
            The numbers of each rank, by rank.

        Raises:
            DashError: there is no group; the methods below raise it too.
            RuntimeError: another rank has left the group or has died.
        """
        if self._alone():
            return [list(numbers)]
        with self._waiting():
            rows = self._exchange.gather(torch.tensor(numbers, dtype=torch.int64), self._group)
        self.meetings += 1
        return rows.tolist()

    def gather_padded(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gather signed 64-bit numbers from all ranks, of which each may give a different count.

        Returns:
            The numbers of each rank, by rank, without padding.
        """
        counts = [count for (count,) in self.gather([len(numbers)])]
        padded = [*numbers, *[0] * (max(counts) - len(numbers))]
        return [row[:count] for row, count in zip(self.gather(padded), counts, strict=True)]

    def broadcast(self, content: torch.Tensor, source: int) -> torch.Tensor:
        """Send the content of rank `source` to all ranks, and return it.

        Args:
            content: uint8 [n] on the CPU; on ranks other than `source`, its values do not matter.
            source: the rank that sends.
        """
        return content if self._alone() else self._exchange.broadcast(content, source, self._group)

    def highest(self, numbers: Sequence[int]) -> list[int]:
        """The maximum over all ranks of each of these signed 64-bit numbers."""
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
        """Let the other ranks know if this rank has waited long in an exchange; called from any thread."""
        board, since, meetings = self._board, self._waits, self.meetings
        if board and since is not None and self._reported != meetings and time.monotonic() - since > LONG:
            self._reported = meetings
            board.write(f"waits {meetings}")

    def others_wait(self) -> bool:
        """Whether another rank has waited long for this one in the next exchange; called from any thread."""
        board = self._board
        return board is not None and board.has(f"waits {self.meetings}")

    def close(self) -> None:
        """Wait until no thread of gloo holds a tensor that was sent, and leave the group."""
        self._exchange.close()
        self.end("the guard has ended")
