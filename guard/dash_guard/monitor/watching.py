"""The monitor with what it needs to watch a job from one process: its store, its judges, processes of this node."""

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

from ..detectors.all import JUDGES
from ..detectors.judge import Job
from ..report.findings import Finding
from ..shared.processes import ENDED, Processes, State, node
from ..transport.messages import Message
from ..transport.store import JOINED, LEFT, Server
from .monitor import Monitor

log = logging.getLogger("dash_guard")

TURN = 0.2
"""Seconds between two judgements."""

_WRITE = 5.0  # seconds between two writes of the coverage


class Watching:
    """One for a job, in the process that watches it.

    Args:
        folder: where findings and coverage go.
        listener: where to host the store (`store.listen`); it is closed if that cannot be done.
        secret: of the job.
        tell: gets every finding once.

    Raises:
        OSError: the store cannot be hosted, or the folder cannot be made.
    """

    def __init__(self, folder: Path, listener: socket.socket, secret: str, tell: Callable[[Finding], None]) -> None:
        self.folder, self.job = folder, Job(0)
        with contextlib.closing(listener):
            folder.mkdir(parents=True, exist_ok=True)
            self._mailbox = _Mailbox(Server(listener, secret, self.job.coverage))
        self.monitor = Monitor(
            self.job, self._mailbox, [judge(self.job, raises=True) for judge in JUDGES], folder, tell, time.time
        )
        self._processes, self._judged, self._written = Processes(), 0.0, 0.0

    @property
    def joined(self) -> int:
        """Ranks that have ever joined."""
        return len(self._mailbox.joined)

    @property
    def connected(self) -> int:
        """Ranks that have joined, and have neither left nor ended."""
        return len(self._mailbox.present)

    def turn(self, seconds: float = TURN) -> None:
        """Wait for so long, or until a process ends, take messages, and judge if it is time for it."""
        self._processes.wait(seconds)
        self._processes.watch(self._mailbox.new_pids())
        for state in self._processes.changed():
            self._mailbox.add(process_message(state))
        now = time.monotonic()
        if now - self._judged >= seconds:
            self._judged = now
            self.monitor.turn(now)
        if now - self._written > _WRITE:
            self._write(now)

    def ending(self) -> None:
        """Somebody has asked the job to end: what ranks do now is no finding."""
        self._mailbox.add(Message("process", 0, 0, {"ending": True}))

    def close(self, patience: float = 1.0) -> None:
        """Take what is left, for so many seconds at most, and judge it for the last time."""
        deadline = time.monotonic() + patience
        while self.connected and time.monotonic() < deadline:
            self.turn(0.05)
        self.turn(0.0)
        self.monitor.finish(time.monotonic())
        self._write(time.monotonic())
        self._processes.close()
        self._mailbox.close()

    def _write(self, now: float) -> None:
        self._written = now
        path = self.folder / "coverage.json"
        content = {"v": 1, "world": self.job.world, "joined": self.joined, "checks": self.monitor.coverage.to_dict()}
        draft = path.with_suffix(f".{os.getpid()}")
        try:
            draft.write_text(json.dumps(content), encoding="utf-8")
            os.replace(draft, path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            self._written = float("inf")
            log.warning("the guard cannot write %s: %s", path, error)


def process_message(state: State) -> Message:
    """What this node tells the monitor of one of its processes."""
    return Message("process", 0, 0, {"node": node(), "pid": state.pid, "state": state.state, "status": state.status})


class _Mailbox:
    """The messages of the store, and those that this process makes itself; notes which ranks are there.

    Attributes:
        joined: ranks that were ever there.
        present: ranks that are there.
    """

    def __init__(self, server: Server) -> None:
        self._server, self._own = server, list[Message]()
        self._pids = list[int]()
        self._ranks: dict[tuple[Any, Any], int] = {}  # by node and process
        self.joined, self.present = set[int](), set[int]()

    def receive(self) -> list[Message]:
        """What has come."""
        received, self._own = [*self._own, *self._look()], []
        return received

    def order(self, ranks: tuple[int, ...], message: Message) -> None:
        """Ask something of ranks."""
        self._server.order(ranks, message)

    def add(self, message: Message) -> None:
        """A message of this process."""
        self._note(message)
        self._own.append(message)

    def new_pids(self) -> list[int]:
        """Processes of ranks on this node that are new since the last call."""
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
        """Nothing comes any more."""
        self._server.close()
