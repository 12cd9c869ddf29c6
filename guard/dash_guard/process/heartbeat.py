"""The heartbeats of a rank: once a second, a thread that never waits for the training sends the rank's position.

A heartbeat also carries how long the rank has worked in the steps that have ended, which `checks.times` measures.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from dash_inductor.errors import described

from ..checks.times import Times
from ..observation import environment
from ..shared.heartbeat import PERIOD, packed
from ..shared.processes import load
from ..transport.messages import Message
from ..upstream import collectives
from . import flight, stacks
from .rank import Rank

log = logging.getLogger("dash_guard")

_STEPS = 4  # steps in one heartbeat
_GROUPS = 24
_COVERAGE = 10  # heartbeats between two reports of the coverage
_LONGEST = 4.0  # seconds between two readings of the flight recorder
_LAST = 5.0  # seconds that the last heartbeat may take
_SHARE = 100  # reading the flight recorder may take 1/100 of the time


class Heartbeats:
    """The thread that sends heartbeats to the monitor until `close`.

    Args:
        rank: the rank of this process.
        times: the rank's check `Times`.
        drains: functions that are called with each heartbeat, to wait for results of devices and send them.
    """

    def __init__(self, rank: Rank, times: Times, drains: Sequence[Callable[[], None]] = ()) -> None:
        self._rank, self._times, self._drains = rank, times, drains
        self._end, self._phase = threading.Event(), ""
        self._reported: dict[str, list[int]] = {}
        self._heartbeats = 0
        self._keys: tuple[str, ...] = ()
        self._read_again, self._entries = 0.0, list[flight.Entry]()
        self._at: object = None  # the step and the collectives at the last heartbeat
        self._pending: list[tuple[int, int, int]] = []
        self._thread = threading.Thread(target=self._run, name="dash-guard-heartbeat", daemon=True)
        self._thread.start()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A context manager that names what the program does inside it, such as "evaluation"."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def close(self) -> None:
        """Stop sending heartbeats, and wait up to five seconds for the thread.

        A thread that is inside PyTorch's flight recorder when the interpreter ends would abort the process.
        """
        self._end.set()
        self._thread.join(timeout=_LAST)

    def _run(self) -> None:
        try:
            while not self._end.wait(PERIOD):
                self._heartbeat()
        except Exception as error:  # an error of the guard never ends the training
            why = f"switched off: {described(error)}"
            self._rank.coverage.unseen("heartbeat", why)
            log.warning("the heartbeats of the guard are off: %s", why)

    def _heartbeat(self) -> None:
        began, now = time.thread_time(), time.monotonic()
        if now >= self._read_again:
            self._entries = list(collectives.entries())
            self._read_again = now + min(_LONGEST, _SHARE * (time.thread_time() - began) - PERIOD / 2)
            self._send_groups()
            self._send_steps()
        self._send_keys()
        groups = flight.waits(self._entries)
        at = self._rank.step, [(name, of[:2]) for name, of in groups.items()]
        if at != self._at:
            self._at = at
            self._rank.work.step()
        work = self._rank.work.look(now)
        if len(groups) > _GROUPS:
            self._rank.coverage.unseen("hang", "process groups beyond the number that fits into a heartbeat")
            waiting = sorted(groups, key=lambda name: groups[name][0] == groups[name][1])
            groups = {name: groups[name] for name in waiting[:_GROUPS]}
        self._send(
            "heartbeat",
            frame=stacks.place(),
            work=work,
            busy=self._rank.work.place,
            phase=self._phase or stacks.phase(),
            groups=groups,
            pairs=flight.pairs(self._entries),
            median=self._times.median(),
            idle=self._idle(),
        )
        for drain in self._drains:
            drain()
        self._heartbeats += 1
        if self._heartbeats % _COVERAGE == 0:
            self._send("coverage", **self._rank.coverage.news())
        self._rank.coverage.count("heartbeat", heartbeats=1, milliseconds=round(1000 * (time.thread_time() - began)))

    def _idle(self) -> float:
        """Seconds since the last collective was entered or the last step ended, by the clock of this rank."""
        last = max(int(self._entries[-1].get("time_created_ns", 0)) if self._entries else 0, self._times.last())
        return round(max(0.0, (time.time_ns() - last) / 1e9), 2) if last else 0.0

    def _send_groups(self) -> None:
        groups = collectives.groups()
        new = {name: packed(ranks) for name, ranks in groups.items() if self._reported.get(name) != ranks}
        self._reported = groups
        for name, ranks in new.items():
            self._send("groups", name=name, ranks=ranks)

    def _send_steps(self) -> None:
        self._pending = (self._pending + self._times.take())[-64:]
        ready, waiting = [], []
        for step, begin, end in self._pending:
            found = flight.step(step, begin, end, self._entries)
            if found is None:
                waiting.append((step, begin, end))
            elif found.own or found.kernels:
                ready.append(found)
        self._pending = waiting
        steps = flight.sampled(ready, _STEPS)
        self._rank.coverage.count("slow", steps=len(steps))
        if len(steps) < len(ready):
            self._rank.coverage.unseen("slow", "steps between those that are sampled", len(ready) - len(steps))
        for of in steps:
            body = {"shape": of.shape, "own": of.own, "total": of.total, "kernels": of.kernels, "load": load()}
            self._rank.channel.send(Message("times", self._rank.number, of.step, body))

    def _send_keys(self) -> None:
        keys = environment.numerics_keys()
        if keys != self._keys:
            self._keys = keys
            self._send("keys", keys=list(keys)[:64])

    def _send(self, kind: str, **body: object) -> None:
        self._rank.channel.send(Message(kind, self._rank.number, self._rank.step, dict(body)))
