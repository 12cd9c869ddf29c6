"""A rank that trains on where the others update: they must not wait for it in a meeting that it knows nothing of.

Meetings of the guard lie in steps, and a step ends with an update.  A rank whose program skips an update by itself
counts one step less than the others: they wait for it in a meeting, and it waits for them in a collective of the
training.  Such a rank has begun all forwards of a step, or even more, and then neither updates nor does anything else;
or a step of it has had more forwards than any before, and nothing happens before ranks have met again.  If another rank
waits in a meeting by then, it ends its group: the others get an error at once, and all go on without what needs
meetings (Note [No deadlock]).  Where nobody does, ranks wait for one that writes a checkpoint, or compiles, and nothing
is ended.
"""

from __future__ import annotations

import threading
import time

from .group import Group

EXTRA = 10.0
"""Seconds without an event of the training, where a step has more forwards than any before; four steps if longer."""

USUAL = 60.0
"""The same where it has as many as others: the backward may be compiled meanwhile."""

_TICK = 0.5  # seconds
_WHY = "this rank trained on where it used to update, and nothing happened for {:.0f} s"


class Lonely:
    """Watches a rank on a thread of its own, and tells others if it waits long in a meeting.

    Args:
        group: that it may end.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._count = self._most = 0  # forwards in this step, and in any before
        self._seconds, self._began = 0.0, time.monotonic()  # of the last step
        self._latest = self._began  # event of the training
        self._updates = False
        self._doubt = -1  # meetings before the last step with more forwards than any before
        self._done = threading.Event()

    def start(self) -> None:
        """Ranks have met, and will meet again."""
        threading.Thread(target=self._watch, name="dash-guard-lonely", daemon=True).start()

    def event(self) -> None:
        """Something has happened in the training."""
        self._latest = time.monotonic()

    def forward_begins(self) -> None:
        """An outermost module begins."""
        self._count += 1

    def updates(self) -> None:
        """An optimizer is about to step, perhaps after a meeting."""
        self._updates = True

    def step_done(self) -> None:
        """An optimizer has stepped, or all ranks have skipped an update."""
        now = self._latest = time.monotonic()
        if self._count:
            self._seconds, self._began = now - self._began, now
        if 0 < self._most < self._count:
            self._doubt = self._group.meetings
        self._most, self._count, self._updates = max(self._most, self._count), 0, False

    def close(self) -> None:
        """Watch no more."""
        self._done.set()

    def _watch(self) -> None:
        while not self._done.wait(_TICK):
            self._group.tell()
            begun, doubtful = 0 < self._most <= self._count, self._doubt == self._group.meetings
            if self._updates or not (begun or doubtful):
                continue
            patience = max(EXTRA if self._count > self._most else USUAL, 4 * self._seconds)
            if time.monotonic() - self._latest > patience and self._group.others_wait():
                self._group.end(_WHY.format(patience))
                return
