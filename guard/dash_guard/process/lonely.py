"""Detects a rank that goes on training without the optimizer step that the others make, and keeps them from waiting.

Ranks exchange messages of the guard's own group ("meetings") at fixed places of a step, and a step ends with an
optimizer step.  A rank whose program skips an optimizer step counts one step less than the others: they wait for it in
a meeting, and it waits for them in a collective of the training.  This rank is recognised by two signs.  It has begun
at least all forwards of a step, and then neither makes an optimizer step nor does anything else.  Or one of its steps
has had more forwards than any before, and nothing happens before ranks have met again.

If another rank waits in a meeting by then, this rank leaves the group.  The others get an error at once, and all ranks
go on without the checks that need meetings (Note [No deadlock]).  If no rank waits in a meeting, the others wait in the
training, for example for a checkpoint or a compilation, and nothing is ended.
"""

from __future__ import annotations

import threading
import time

from .group import Group

EXTRA = 10.0
"""Seconds without an event of the training after a step with more forwards than any before; four steps if longer."""

USUAL = 60.0
"""The same for a step with as many forwards as others, whose backward may be compiled now."""

_TICK = 0.5  # seconds
_LAST = 5.0  # seconds that the last look at the store may take
_WHY = "this rank trained on where it used to update, and nothing happened for {:.0f} s"


class Lonely:
    """A thread that keeps other ranks from waiting without end for this rank in a meeting, an exchange among all ranks.

    It tells the others if this rank has waited long in a meeting. If another rank has told so, and this rank neither
    updates nor has any other event of the training for some time, this rank leaves the group for good, and the others
    get an error at once.

    Args:
        group: the group of all ranks, which this rank leaves if needed.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._count = self._most = 0  # forwards in this step, and in any before
        self._seconds, self._began = 0.0, time.monotonic()  # of the last step
        self._latest = self._began  # time of the last event of the training
        self._updates = False
        self._doubt = -1  # meetings before the last step with more forwards than any before
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; called after ranks have met for the first time."""
        self._thread = threading.Thread(target=self._watch, name="dash-guard-lonely", daemon=True)
        self._thread.start()

    def event(self) -> None:
        """Note the time of an event of the training."""
        self._latest = time.monotonic()

    def forward_begins(self) -> None:
        """Count a forward of an outermost module in this step."""
        self._count += 1

    def updates(self) -> None:
        """Note that an optimizer is about to step, perhaps after a meeting (an exchange among all ranks)."""
        self._updates = True

    def step_done(self) -> None:
        """Begin to count a new step: an optimizer has stepped, or all ranks have skipped an update."""
        now = self._latest = time.monotonic()
        if self._count:
            self._seconds, self._began = now - self._began, now
        if 0 < self._most < self._count:
            self._doubt = self._group.meetings
        self._most, self._count, self._updates = max(self._most, self._count), 0, False

    def close(self) -> None:
        """Stop the thread, and wait up to five seconds for it.

        A thread that is inside the store when the interpreter ends would abort the process.
        """
        self._done.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=_LAST)

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
