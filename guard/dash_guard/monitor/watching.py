"""The monitor with everything that it needs to watch a job: its store, its detectors, and this node's processes."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..detectors.all import DETECTORS
from ..detectors.detector import Job
from ..report.findings import Finding
from ..shared.processes import ENDED, Processes, State, node
from ..transport.messages import Message
from ..transport.store import JOINED, LEFT, Server
from .clock import Clock
from .monitor import Monitor

log = logging.getLogger("dash_guard")

TURN = 0.2
"""Seconds between two runs of the detectors."""

_WRITE = 5.0  # seconds between two writes of the coverage


class Watching:
    """Hosts the store, and runs the monitor of a job in this process.

    Args:
        folder: the folder of findings and coverage.
        listener: the listening socket of the store (`store.listen`); it is closed if the store cannot be hosted.
        secret: the secret that ranks must know to connect.
        tell: is called once with every finding.

    Raises:
        OSError: the store cannot be hosted, or the folder cannot be made.
    """

    def __init__(self, folder: Path, listener: socket.socket, secret: str, tell: Callable[[Finding], None]) -> None:
        self.folder, self.job = folder, Job(0)
        with contextlib.closing(listener):
            folder.mkdir(parents=True, exist_ok=True)
            self._mailbox = _Mailbox(Server(listener, secret, self.job.coverage))
        self.monitor = Monitor(
            self.job,
            self._mailbox,
            [detector(self.job, raises=True) for detector in DETECTORS],
            folder,
            tell,
            time.time,
        )
        self._clock = Clock()
        self._processes, self._last_turn, self._written = Processes(), 0.0, 0.0

    @property
    def joined(self) -> int:
        """The number of ranks that have ever joined."""
        return len(self._mailbox.joined)

    @property
    def connected(self) -> int:
        """The number of ranks that have joined, have not left, and whose process has not ended."""
        return len(self._mailbox.present)

    def turn(self, seconds: float = TURN) -> None:
        """Wait for `seconds`, or until a process ends; then take messages, and run the detectors if it is time."""
        self._processes.wait(seconds)
        gaps, now = self._clock.gaps, self._clock.now()
        if self._clock.gaps > gaps:
            self._mailbox.add(Message("process", 0, 0, {"away": True}))
            self.job.coverage.unseen("liveness", "the monitor did not run for more than 2 s")
        self._processes.watch(self._mailbox.new_pids())
        for state in self._processes.changed():
            self._mailbox.add(process_message(state))
        if now - self._last_turn >= seconds:
            self._last_turn = now
            self.monitor.turn(now)
        if now - self._written > _WRITE:
            self._write(now)

    def ending(self) -> None:
        """Note that the job was asked to end: what ranks do from now on causes no findings."""
        self._mailbox.add(Message("process", 0, 0, {"ending": True}))

    def close(self, patience: float = 1.0) -> None:
        """Take the last messages, for `patience` seconds at most, and run the detectors for the last time."""
        deadline = self._clock.now() + patience
        while self.connected and self._clock.now() < deadline:
            self.turn(0.05)
        self.turn(0.0)
        self.monitor.finish(self._clock.now())
        self._write(self._clock.now())
        self._processes.close()
        self._mailbox.close()

    def _write(self, now: float) -> None:
        self._written = now
        path = self.folder / "coverage.json"
        content = {"v": 1, "world": self.job.world, "joined": self.joined, "checks": self.monitor.coverage.to_dict()}
        temporary = path.with_suffix(f".{os.getpid()}")
        try:
            temporary.write_text(json.dumps(content), encoding="utf-8")
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            self._written = float("inf")
            log.warning("the guard cannot write %s: %s", path, error)


def process_message(state: State) -> Message:
    """The message to the monitor about the state of a process on this node."""
    return Message("process", 0, 0, {"node": node(), "pid": state.pid, "state": state.state, "status": state.status})


class _Mailbox:
    """The messages of the store and of this process; keeps which ranks are present.

    Attributes:
        joined: ranks that have ever joined.
        present: ranks that have joined and neither left nor ended.
    """

    def __init__(self, server: Server) -> None:
        self._server, self._own = server, list[Message]()
        self._pids = list[int]()
        self._ranks: dict[tuple[Any, Any], int] = {}  # by node and process
        self.joined, self.present = set[int](), set[int]()

    def receive(self) -> list[Message]:
        """The messages from ranks and from this process since the last call."""
        received, self._own = [*self._own, *self._look()], []
        return received

    def order(self, ranks: tuple[int, ...], message: Message) -> None:
        """Send a request to these ranks."""
        self._server.order(ranks, message)

    def add(self, message: Message) -> None:
        """Add a message from this process, for the next `receive`."""
        self._note(message)
        self._own.append(message)

    def new_pids(self) -> list[int]:
        """The process ids of the ranks on this node that have joined since the last call."""
        self._own += self._look()
        pids, self._pids = self._pids, []
        return pids

    def _look(self) -> list[Message]:
        received = self._server.receive()
        for message in received:
            self._note(message)
        return received

    def _note(self, message: Message) -> None:
        process = message.body.get("node"), message.body.get("pid")
        if message.kind == JOINED:
            self.joined.add(message.rank)
            self.present.add(message.rank)
            self._ranks[process] = message.rank
            if process[0] == node() and isinstance(process[1], int) and process[1] > 1:
                self._pids.append(process[1])
        elif message.kind == LEFT:
            self.present.discard(message.rank)
        elif message.kind == "process" and message.body.get("state") == ENDED:
            self.present.discard(self._ranks.pop(process, -1))

    def close(self) -> None:
        """Close the store."""
        self._server.close()
