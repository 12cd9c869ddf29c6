"""`guard`, which names the rank of a training run that computes wrongly, hangs, has died or lags, during the run."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from dash_inductor import arguments as _arguments
from dash_inductor.errors import DashError
from dash_inductor.observers import active, hooks
from dash_inductor.observers.log import Log
from dash_inductor.observers.log import check as check_log
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
from .alerts import Alerts
from .heartbeat import Heartbeats
from .rank import Rank
from .settings import OnConfirmed

log = logging.getLogger("dash_guard")

_LAST = 10.0  # seconds in which a process that ends waits for the thread that looks for process groups


def guard(
    folder: str | os.PathLike[str],
    *,
    every: int = 1,
    at_rest: int = 1,
    cross_rank_recompute: int = 100,
    same_rank_recompute: int = 0,
    collectives: int = 1,
    on_confirmed: OnConfirmed = "warn",
    live: bool = True,
    log_to: Log | None = None,
) -> Guard:
    """Watch this rank of a training run within a ``with`` block; all ranks must do so.

        with dash_guard.guard("runs/a"):
            train()

    ``DASH_GUARD=folder`` watches a whole program that is not changed, and ``dash-guard watch`` watches all processes of
    a launcher. ``DASH_GUARD_SETTINGS=same_rank_recompute=10,on_confirmed=raise`` passes settings to them.

    Rank 0 starts a monitor, a process that outlives it, unless ``dash-guard watch`` has started one. The monitor prints
    one line for each finding and appends it to ``findings.jsonl`` in the folder. The guard changes no bit of the
    training, and ends it only with ``on_confirmed="raise"``.

    Args:
        folder: where findings and coverage go; all ranks of this machine name the same folder.
        every: n: compare replicas in every n-th step, from 1.
        at_rest: n: compare state at rest in every n-th step; 0: never.
        cross_rank_recompute: n: run one rank's micro-batch on all ranks in one of n steps; 0: only in the first step
            and after a suspicion.
        same_rank_recompute: how many of 100 steps are run a second time on the same rank, from 0 to 100.
        collectives: n: check gathered parameters and checksums of reductions in every n-th step; 0: never.
        on_confirmed: what follows a confirmed fault: "warn" prints it. "raise" also raises `FaultConfirmedError` on
            every rank before an optimizer steps, once, if a machine or the network has made bits wrong, or if ranks
            differ in gradients, parameters or optimizer state that the program declares to be equal on all of them
            (DDP, `replicate`). For that, ranks agree over a group of their own, and each step waits for the device
            once; where ranks cannot agree, findings are only printed.
        live: also find ranks that hang, have died, are stopped or slow.
        log_to: gets an alert for each finding until the guard ends; one rank of the folder should have it.
            `dash_inductor.integrations` has logs for W&B, TensorBoard and MLflow.

    Returns:
        A context manager, `Guard`.

    Raises:
        ArgumentError: a bad argument.
    """
    numbers = {
        "every": every,
        "at_rest": at_rest,
        "cross_rank_recompute": cross_rank_recompute,
        "same_rank_recompute": same_rank_recompute,
        "collectives": collectives,
    }
    settings.check(numbers, on_confirmed)
    _arguments.truth("live", live)
    check_log(log_to)
    return Guard(_arguments.path("folder", folder).absolute(), numbers, on_confirmed, live, log_to)


class Guard:
    """Watches this rank of a training run, and reports to the monitor; a context manager, made by `guard`.

    Attributes:
        folder: the folder of findings and coverage.
    """

    def __init__(
        self,
        folder: Path,
        numbers: dict[str, int],
        on_confirmed: OnConfirmed = "warn",
        live: bool = True,
        log_to: Log | None = None,
    ) -> None:
        self.folder, self._settings, self._on_confirmed, self._live = folder, numbers, on_confirmed, live
        self._log_to, self._alerts = log_to, ExitStack()
        self._rank: Rank | None = None
        self._line: Line | None = None
        self._heartbeats: Heartbeats | None = None
        self._lock, self._process = threading.Lock(), os.getpid()

    def __enter__(self) -> Guard:
        before = _present[0] if _present else None
        if before is not None:
            if before.is_explicit():
                raise DashError(f"a guard is on already, into {before.folder}: end it first")
            before.close()
        _present[:] = [self]
        self.start()
        if self._log_to is not None:
            self._alerts.callback(Alerts(self.folder, self._log_to).close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def is_explicit(self) -> bool:
        """Whether the program, and not the environment, has started this guard."""
        return True

    @property
    def findings(self) -> list[findings.Finding]:
        """All findings up to now, of any rank; the monitor must write to the same folder.

        Raises:
            RecordingError: the file of findings cannot be read.
        """
        return findings.read(self.folder)

    @property
    def coverage(self) -> dict[str, Any]:
        """What this rank has checked, and what it has not checked and why.

        It has the form ``{check: {"counts": {unit: number}, "unseen": {reason: times}}}``; {} before the guard has
        started.
        """
        return self._rank.coverage.to_dict() if self._rank is not None else {}

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A context manager that names what the program does inside it, such as "evaluation" on rank 0.

        While other ranks wait for this one in a named phase, the guard reports a note, and no hang for the first half
        hour.
        """
        return self._heartbeats.phase(name) if self._heartbeats is not None else contextlib.nullcontext()

    def cross_rank_recompute(self, fn: Callable[[], Any]) -> None:
        """Run a cross-rank recompute of a function of the program now; all ranks call this at the same place.

        The function runs at least once, and leaves no trace in the training: gradients, buffers, random numbers and
        counters of DDP are restored. Before the first forward of a model, and between a forward and its backward under
        FSDP2, nothing is run, and the coverage says so.

        Args:
            fn: runs forward and backward of the same inputs on all ranks.

        Raises:
            DashError: the check is off; the coverage has the reason.
        """
        checks = self._rank.checks if self._rank is not None else []
        for check in checks:
            run_now = getattr(check, "run_now", None)
            if self._rank is not None and check.name == "cross_rank_recompute" and run_now is not None:
                if self._rank.run_together(check, functools.partial(run_now, fn)):
                    return
                break
        raise DashError("no cross-rank recompute can run: its check is off, and the coverage has the reason")

    def start(self) -> None:
        """Begin to watch this process; does nothing if it is being watched."""
        self._begin(None)

    def _begin(self, instead: Observer | None) -> None:
        """Begin to watch this process in the place of another observer, see `rank.Rank.start`."""
        with self._lock:
            if self._rank is not None:
                return
            number, world = environment.rank_and_world()
            coverage = Coverage()
            self._line = Line(self._finder(number), self._hello(world), number, coverage)
            self._rank = rank = Rank(number, world, self._line)
            rank.coverage = coverage
            rank.group.settings = f"{sorted(self._settings.items())} {self._on_confirmed}"
        for kind in CHECKS:
            if kind in (Times, Data) and not self._live:  # their results are sent with heartbeats
                coverage.unseen(kind.name, "live=False")
                continue
            try:
                rank.add(functools.partial(kind, rank, **self._settings))
            except Exception as error:  # a check never ends the training
                coverage.unseen(kind.name, f"could not begin: {error}")
                log.warning("the check %s of the guard could not begin: %s", kind.name, error)
        if self._on_confirmed == "raise":
            replicas = next((check for check in rank.checks if isinstance(check, Replicas)), None)
            rank.add(functools.partial(Stop, rank, replicas))  # runs last: the other checks have seen the step by then
        rank.start(instead)
        if self._live:
            times = next(check for check in rank.checks if isinstance(check, Times))
            self._heartbeats = Heartbeats(
                rank, times, [check.drain for check in rank.checks if isinstance(check, Data)]
            )

    def close(self) -> None:
        """Stop watching, and send the coverage to the monitor."""
        if self in _present:
            _present.remove(self)
        if self._rank is None or os.getpid() != self._process:
            return
        if self._heartbeats is not None:
            self._heartbeats.close()
        self._rank.close()
        if self._line is not None and self._line.cut:
            self._keep_coverage(self._rank)
        self._alerts.close()

    def _keep_coverage(self, rank: Rank) -> None:
        """Write the coverage to a file, because the monitor has not received it."""
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
"""The guard of this process; empty if there is none."""


class FromEnvironment(Guard):
    """A guard that the environment variable DASH_GUARD starts, as soon as the process turns out to be a rank.

    Launchers, workers of data loaders and compilers inherit the variable too, but train nothing.
    """

    def __init__(self, folder: Path, numbers: dict[str, int], on_confirmed: OnConfirmed = "warn") -> None:
        super().__init__(folder, numbers, on_confirmed)
        self._waiting: _Waiting | None = _Waiting(self)
        self._beginning, self._ended = threading.Lock(), threading.Event()
        self._looking = threading.Thread(target=self._look, name="dash-guard", daemon=True)

    def is_explicit(self) -> bool:
        """False: the environment has started this guard, not the program."""
        return False

    def wait(self) -> None:
        """Register this guard, which starts at the first process group, or when a module or optimizer first runs."""
        _present[:] = [self]
        prepare(os.environ)
        assert self._waiting is not None
        active.observers.append(self._waiting)
        hooks.install()
        self._looking.start()

    def start(self) -> None:
        """Start the guard in place of the observer that waits for the first event; later calls do nothing.

        That observer calls this at the first event; a thread calls it once a process group exists.
        """
        with self._beginning:
            waiting, self._waiting = self._waiting, None
            if waiting is not None:
                self._begin(waiting)

    @property
    def rank(self) -> Rank | None:
        """The `Rank` that observes this process, or None until the guard has started."""
        return self._rank

    def close(self) -> None:
        """Stop watching, also if the guard has not started yet.

        A thread that starts the guard when the interpreter ends would abort the process.
        """
        waiting, self._waiting = self._waiting, None
        if waiting in active.observers:
            active.observers.remove(waiting)
        self._ended.set()
        here = os.getpid() == self._process and self._looking is not threading.current_thread()
        if here and self._looking.is_alive():
            self._looking.join(timeout=_LAST)
        super().close()

    def _look(self) -> None:
        while self._waiting is not None and not self._ended.wait(0.25):
            if collectives.is_up():
                self.start()


class _Waiting(Observer):
    """Begins a guard at the first event."""

    def __init__(self, guard: FromEnvironment) -> None:
        self._guard = guard

    def module_begins(self, module: nn.Module) -> None:
        """Start the guard at the first module's forward, and pass the event on to it."""
        self._begin(lambda observer: observer.module_begins(module))

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Start the guard at the first optimizer step, and pass the event on to it."""
        self._begin(lambda observer: observer.before_optimizer(optimizer))

    def _begin(self, event: Callable[[Observer], None]) -> None:
        self._guard.start()  # waits if another thread starts it now
        if self._guard.rank is not None:
            event(self._guard.rank)
