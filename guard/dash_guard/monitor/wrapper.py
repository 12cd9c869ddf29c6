"""The process that runs a launcher: it hosts the monitor, watches the processes of this node, and forwards signals."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from dash_inductor.errors import ArgumentError

from ..process.settings import VARIABLE, parse
from ..report.coverage import Coverage
from ..report.findings import Finding
from ..shared.processes import Processes, descendants, node
from ..transport import connect, wire
from ..transport.address import is_loopback, parse_address, reachable
from ..transport.messages import Message
from ..transport.store import Line, listen
from ..upstream.flight_variables import prepare
from .monitor import in_own_process
from .standalone import tell
from .watching import TURN, Watching, process_message

FAULT, PROGRAM, UNWATCHED = 10, 11, 12
"""Exit statuses if the program's own is 0 and the caller asks for them: a fault of a machine, of the network or of an
unknown cause, a fault of the program, and a job that could not be watched.
"""

SEVERITIES: dict[str, tuple[str, ...]] = {"suspect": ("suspect", "confirmed"), "confirmed": ("confirmed",)}
"""The severities of findings that fail a job, by the value of `fail_on`."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
_ENDS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
_SCAN = 1.0  # seconds between two searches for new processes, on a node without the monitor


class Wrapper:
    """Runs a launcher, such as torchrun, and watches its ranks.

    Args:
        program: the program with its arguments.
        folder: the folder of findings.
        listen: the address at which the monitor listens; by default a free port of the loopback interface.
        join: the address of the monitor on another node; then this node has no monitor.
        strict: whether a job that could not be watched is an error.
        metrics: the address at which metrics are served; None: no metrics.
        settings: settings of the guard, each ``NAME=VALUE``; None: those of the environment.
        fail_on: one of `SEVERITIES`: findings of this severity or a higher one set the exit status; None: no finding
            does, and the status is that of the program.

    Raises:
        ArgumentError: a bad setting, address or severity, or an address outside this machine without a secret.
        MissingPackageError: metrics are wanted, and prometheus_client is not installed.
    """

    def __init__(
        self,
        program: Sequence[str],
        folder: Path,
        listen: str | None = None,
        join: str | None = None,
        strict: bool = False,
        metrics: str | None = None,
        settings: Sequence[str] | None = None,
        fail_on: str | None = None,
    ) -> None:
        if fail_on is not None and fail_on not in SEVERITIES:
            raise ArgumentError("fail_on", fail_on, SEVERITIES)
        self._failing = SEVERITIES[fail_on] if fail_on is not None else ()
        self._program, self._folder, self._strict = list(program), folder.absolute(), strict
        self._settings = os.environ.get(VARIABLE, "") if settings is None else ",".join(settings)
        parse(self._settings, VARIABLE if settings is None else "set")
        self._join = parse_address(join, "join") if join else None
        self._listen = parse_address(listen, "listen") if listen else ("127.0.0.1", 0)
        secret = wire.secret_of(os.environ)
        outside = self._join or self._listen
        if secret is None and not is_loopback(outside[0]):
            raise ArgumentError(
                "join" if self._join else "listen",
                join or listen,
                f"an address of this machine alone, or a secret in {wire.SECRET} or {wire.SECRET_FILE}",
            )
        self._secret = secret or wire.new_secret()
        self._watching: Watching | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._signal = 0
        if shutil.which(self._program[0]) is None:
            raise ArgumentError("program", self._program[0], "a program that can be run")
        self._metrics = None
        if metrics is not None:
            from .metrics import Metrics

            self._metrics = Metrics(parse_address(metrics, "metrics"))

    def run(self) -> int:
        """Run the program to its end, and watch it.

        Returns:
            The exit status: the program's own if it is not 0; otherwise 0, `FAULT`, `PROGRAM` or `UNWATCHED`.
        """
        environment = dict(os.environ)
        in_own_process()
        listener = self._listener() if self._join is None else None
        address = self._join if listener is None else listener.getsockname()[:2]
        if address is not None:
            environment[connect.FOLDER] = os.fspath(self._folder)
            host = "127.0.0.1" if self._join is None and is_loopback(self._listen[0]) else reachable(address[0])
            environment[connect.ADDRESS] = f"[{host}]:{address[1]}" if ":" in host else f"{host}:{address[1]}"
            environment[wire.SECRET] = self._secret
            environment[VARIABLE] = self._settings
            prepare(environment)
        before = {number: signal.signal(number, self._pass_on) for number in _SIGNALS}
        try:
            self._child = subprocess.Popen(self._program, env=environment, preexec_fn=os.setpgrp)
            if listener is not None:  # ranks that start before the store wait for it
                self._begin(listener)
            status = self._helped() if self._join is not None else self._watched()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._status(128 - status if status < 0 else status)

    def _listener(self) -> socket.socket | None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return listen(self._listen)
        except OSError as error:
            self._warn(f"the job is not watched: {error}")
            return None

    def _begin(self, listener: socket.socket) -> None:
        try:
            self._watching = Watching(self._folder, listener, self._secret, tell)
        except OSError as error:
            self._warn(f"the job is not watched: {error}")

    def _watched(self) -> int:
        """Watch the ranks until the program ends.

        Returns:
            The exit status of the program.
        """
        assert self._child is not None
        while (status := self._child.poll()) is None:
            if self._signal:
                self._forward()
            if self._watching is None:
                time.sleep(TURN / 2)
                continue
            self._watching.turn()
            if self._metrics is not None:
                self._metrics.show(self._watching)
        if self._watching is not None:
            self._watching.close()
        return status

    def _helped(self) -> int:
        """Watch the processes of this node for the monitor of another node, until the program ends.

        Returns:
            The exit status of the program.
        """
        assert self._child is not None
        assert self._join is not None
        address = self._join
        hello = {"helper": True, "node": node(), "pid": os.getpid()}
        line = Line(lambda: (address, self._secret), hello, 0, Coverage())
        processes, looked = Processes(), 0.0
        while (status := self._child.poll()) is None:
            if self._signal:
                if self._signal in _ENDS:
                    line.send(Message("process", 0, 0, {"ending": True}))
                self._forward()
            if time.monotonic() - looked > _SCAN:
                looked = time.monotonic()
                processes.watch(descendants(self._child.pid))
            processes.wait(TURN / 2)
            for state in processes.changed():
                if state.state or state.status:
                    line.send(process_message(state))
        processes.close()
        line.close()
        if line.cut and self._strict:
            self._watching = None
        return status

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._signal = number

    def _forward(self) -> None:
        number, self._signal = self._signal, 0
        if self._watching is not None and number in _ENDS:
            self._watching.ending()
        if self._child is not None:
            self._child.send_signal(number)

    def _status(self, status: int) -> int:
        if status:
            return status
        if self._join is not None:
            return 0
        if self._watching is None or not self._watching.joined:
            if self._watching is not None:
                self._warn("no rank has joined: the job was not watched (is the package installed there?)")
            return UNWATCHED if self._strict else 0
        found: list[Finding] = [f for f in self._watching.monitor.findings if f.severity in self._failing]
        if any(finding.cause != "program" for finding in found):
            return FAULT
        return PROGRAM if found else 0

    def _warn(self, text: str) -> None:
        print(f"dash-guard watch: {text}", file=sys.stderr, flush=True)
