"""`guard`: which rank of a training run computes wrongly, hangs, has died or lags, while the run goes on."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from dash_inductor import arguments as _arguments
from dash_inductor.errors import DashError
from dash_inductor.observers import active, hooks
from dash_inductor.observers.observer import Observer

from ..checks.all import CHECKS
from ..checks.data import Data
from ..checks.replicas import Replicas
from ..checks.stop import Stop
from ..checks.times import Times
from ..observation import environment
from ..report import findings
from ..report.coverage import Coverage
from ..shared.processes import node
from ..transport import connect
from ..transport.store import Line
from ..upstream import collectives
from ..upstream.flight_variables import prepare
from . import settings
from .beat import Beats
from .rank import Rank
from .settings import OnVerdict

log = logging.getLogger("dash_guard")


def guard(
    folder: str | os.PathLike[str],
    *,
    every: int = 1,
    rest: int = 1,
    roll_call: int = 100,
    replay: int = 0,
    doors: int = 1,
    on_verdict: OnVerdict = "warn",
    live: bool = True,
) -> Guard:
    """Watch this rank of a training run within a ``with`` block; all ranks do so.

    ``DASH_GUARD=folder`` does so for a whole program without a change of it, and ``dash-guard watch`` for
    all processes of a launcher; ``DASH_GUARD_SETTINGS=replay=10,on_verdict=raise`` has their settings.

        with dash_guard.guard("runs/a"):
            train()

    Rank 0 starts a monitor, a process that outlives it, unless a wrapper has done so.  It prints one line for each
    finding, and appends it to ``findings.jsonl`` in the folder.  Nothing of this changes a bit of the training or ends
    it, except for ``on_verdict="raise"``.

    Args:
        folder: where findings and coverage go; all ranks of this machine name the same one.
        every: steps of which one is compared.
        rest: steps of which the state at rest is compared in one, 0 for none.
        roll_call: steps between two roll calls, 0 for none.
        replay: of 100 steps, how many are run twice.
        doors: steps of which collectives are checked in one, 0 for none.
        on_verdict: "raise" raises `GuardVerdict` in every rank before an optimizer's step, once, after a verdict that a
            machine or the wire has made bits wrong, or if gradients, parameters or optimizer state differ that all
            ranks are declared to have equal (DDP, `replicate`); "warn" only says it. Ranks agree over a group of
            their own for it, each step waits for the device once, and where ranks cannot agree it is only said.
        live: find ranks that hang, have died, are stopped or slow.

    Raises:
        ArgumentError: a bad argument.
    """
    numbers = {"every": every, "rest": rest, "roll_call": roll_call, "replay": replay, "doors": doors}
    settings.check(numbers, on_verdict)
    _arguments.truth("live", live)
    return Guard(_arguments.path("folder", folder).absolute(), numbers, on_verdict, live)


class Guard:
    """A guard of this rank; see `guard`.

    Attributes:
        folder: of findings and coverage.
    """

    def __init__(
        self, folder: Path, numbers: dict[str, int], on_verdict: OnVerdict = "warn", live: bool = True
    ) -> None:
        self.folder, self._settings, self._on_verdict, self._live = folder, numbers, on_verdict, live
        self._rank: Rank | None = None
        self._line: Line | None = None
        self._beats: Beats | None = None
        self._lock, self._process = threading.Lock(), os.getpid()

    def __enter__(self) -> Guard:
        before = _present[0] if _present else None
        if before is not None:
            if before.is_explicit():
                raise DashError(f"a guard is on already, into {before.folder}: end it first")
            before.close()
        _present[:] = [self]
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def is_explicit(self) -> bool:
        """Whether the program has asked for it, and not the environment."""
        return True

    @property
    def findings(self) -> list[findings.Finding]:
        """What was found up to now, by any rank: the folder must be one that the monitor writes."""
        return findings.read(self.folder)

    @property
    def coverage(self) -> dict[str, Any]:
        """What this rank has checked, and what it has not, and why (`coverage.Coverage.to_dict`)."""
        return self._rank.coverage.to_dict() if self._rank is not None else {}

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Say what the program does in a block, such as "evaluation" on rank 0 while others wait: that is no hang."""
        return self._beats.phase(name) if self._beats is not None else contextlib.nullcontext()

    def roll_call(self, fn: Callable[[], Any]) -> None:
        """Hold a roll call now, with a function that does the work that all ranks must do alike; all ranks call this.

        The function runs at least once, and training sees nothing of it: gradients, buffers, random numbers and
        what DDP counts come back.  Before the first forward of a model, and between a forward and its backward of
        FSDP2, none is held, and the coverage says so.

        Args:
            fn: runs forward and backward of the same inputs in all ranks.

        Raises:
            DashError: the guard has no check for it, or it was switched off.
        """
        checks = self._rank.checks if self._rank is not None else []
        for check in checks:
            hold = getattr(check, "hold", None)
            if self._rank is not None and check.name == "roll_call" and hold is not None:
                if self._rank.hold(check, functools.partial(hold, fn)):
                    return
                break
        raise DashError("no roll call can be held: its check is off, for which the coverage has a reason")

    def start(self, instead: Observer | None = None) -> None:
        """Watch from now on.

        Args:
            instead: who has waited for events up to now, see `rank.Rank.start`.
        """
        with self._lock:
            if self._rank is not None:
                return
            number, world = environment.rank_and_world()
            coverage = Coverage()
            self._line = Line(self._finder(number), self._hello(world), number, coverage)
            self._rank = rank = Rank(number, world, self._line)
            rank.coverage = coverage
            rank.group.settings = f"{sorted(self._settings.items())} {self._on_verdict}"
        for kind in CHECKS:
            if kind in (Times, Data) and not self._live:  # what they have is sent with beats
                coverage.unseen(kind.name, "live=False")
                continue
            try:
                rank.checks.append(kind(rank, **self._settings))
            except Exception as error:  # a check never ends the training
                coverage.unseen(kind.name, f"could not begin: {error}")
                log.warning("the check %s of the guard could not begin: %s", kind.name, error)
        if self._on_verdict == "raise":
            replicas = next((check for check in rank.checks if isinstance(check, Replicas)), None)
            rank.checks.append(Stop(rank, replicas))  # the last one: others have seen the step by then
        rank.start(instead)
        if self._live:
            times = next(check for check in rank.checks if isinstance(check, Times))
            self._beats = Beats(rank, times, [check.drain for check in rank.checks if isinstance(check, Data)])

    def close(self) -> None:
        """Watch no more, and say what was checked."""
        if self in _present:
            _present.remove(self)
        if self._rank is None or os.getpid() != self._process:
            return
        if self._beats is not None:
            self._beats.close()
        self._rank.close()
        if self._line is not None and self._line.cut:
            self._keep_coverage(self._rank)

    def _keep_coverage(self, rank: Rank) -> None:
        """The monitor has not got it."""
        path = self.folder / f"coverage-rank{rank.number:05d}.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(rank.coverage.to_dict()), encoding="utf-8")
        except OSError as error:
            log.warning("the guard cannot write %s: %s", path, error)

    def _hello(self, world: int) -> dict[str, Any]:
        return {
            "world": world,
            "host": socket.gethostname(),
            "node": node(),
            "pid": os.getpid(),
        }

    def _finder(self, rank: int) -> Callable[[], connect.Found | None]:
        if os.environ.get(connect.ADDRESS):
            return connect.from_environment
        if rank == 0:
            try:
                connect.start_monitor(self.folder)
            except OSError as error:
                log.warning("the guard cannot start its monitor: %s", error)
        return functools.partial(connect.from_folder, self.folder)


_present: list[Guard] = []
"""The guard of this process, if there is one."""


class FromEnvironment(Guard):
    """A guard of a program that knows nothing of it: it begins when the process turns out to be a rank.

    Launchers, workers of data loaders and compilers inherit the variable too, and train nothing.
    """

    def __init__(self, folder: Path, numbers: dict[str, int], on_verdict: OnVerdict = "warn") -> None:
        super().__init__(folder, numbers, on_verdict)
        self._waiting: _Waiting | None = _Waiting(self)
        self._beginning = threading.Lock()

    def is_explicit(self) -> bool:
        """Whether the program has asked for it."""
        return False

    def wait(self) -> None:
        """Begin at the first process group, or at the first module or optimizer that runs."""
        _present[:] = [self]
        prepare(os.environ)
        assert self._waiting is not None
        active.observers.append(self._waiting)
        hooks.install()
        threading.Thread(target=self._look, args=(threading.Event(),), name="dash-guard", daemon=True).start()

    def start(self, instead: Observer | None = None) -> None:
        """Watch from now on."""
        with self._beginning:
            waiting, self._waiting = self._waiting, None
            if waiting is not None:
                super().start(waiting)

    @property
    def rank(self) -> Rank | None:
        """What gets the events, once it has begun."""
        return self._rank

    def close(self) -> None:
        """Watch no more."""
        waiting, self._waiting = self._waiting, None
        if waiting in active.observers:
            active.observers.remove(waiting)
        super().close()

    def _look(self, tick: threading.Event) -> None:
        while self._waiting is not None and not tick.wait(0.25):
            if collectives.is_up():
                self.start()


class _Waiting(Observer):
    """Begins a guard at the first event."""

    def __init__(self, guard: FromEnvironment) -> None:
        self._guard = guard

    def module_begins(self, module: nn.Module) -> None:
        """The forward of a module begins."""
        self._begin(lambda observer: observer.module_begins(module))

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""
        self._begin(lambda observer: observer.before_optimizer(optimizer))

    def _begin(self, event: Callable[[Observer], None]) -> None:
        self._guard.start()  # a thread may do so now: then this waits for it
        if self._guard.rank is not None:
            event(self._guard.rank)
