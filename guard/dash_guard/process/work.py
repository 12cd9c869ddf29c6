"""Finds out whether a thread of this process gets on with its work: a rank that others wait for may be busy.

It is busy if its stack is one that it did not have before in this wait, if modules run, if it reads or writes, if it
computes, or if it waits for a disk. Only the last two may also be signs of a hang, such as a loop that never ends: the
monitor takes them for work for a while.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from . import stacks

BYTES = 1 << 12
"""Bytes that a thread must read and write between two looks to be busy; a look itself reads fewer."""
SHARE = 0.2
"""The share of the time between two looks that a thread must compute to be busy."""

_STACKS = 1 << 10  # that are remembered
_TICKS = os.sysconf("SC_CLK_TCK")


class Work:
    """Looks at the thread that trains, from another thread; the main thread, until `trains` has named it.

    Attributes:
        place: the function of the program that the thread has been in at all looks since the last `step`, with its
            present line.
    """

    def __init__(self) -> None:
        self.place = ""
        self._thread, self._native = threading.main_thread().ident or 0, threading.main_thread().native_id or 0
        self._modules = self._looked = 0  # modules that have begun, now and at the last look
        self._seen: set[tuple[tuple[int, int], ...]] = set()
        self._common: list[int] = []  # code of the functions that the thread has been in at all looks
        self._io, self._cpu, self._time = 0, 0.0, 0.0

    def trains(self) -> None:
        """Note that this thread runs a module of the program."""
        self._modules += 1
        if threading.get_ident() != self._thread:
            self._thread, self._native = threading.get_ident(), threading.get_native_id()

    def step(self) -> None:
        """Forget former stacks: the thread has entered a collective, or ended a step."""
        self._seen.clear()
        self._common = []

    def look(self, now: float) -> str:
        """What the thread has done since the last look.

        Args:
            now: seconds of a monotonic clock.

        Returns:
            "stack", "modules", "input and output", "computation" or "disk"; "" for nothing.
        """
        frames = stacks.frames_of(self._thread)
        stack = tuple((id(frame.f_code), frame.f_lineno) for frame in frames)
        outside = stacks.outside_of_modules(frames)
        codes = [id(frame.f_code) for frame in outside]
        self._common = _prefix(self._common, codes) or codes
        self.place = stacks.named(outside[len(self._common) - 1]) if outside else ""
        is_new = bool(stack) and stack not in self._seen and bool(self._seen)
        if len(self._seen) < _STACKS:
            self._seen.add(stack)
        io, cpu, state = self._counters()
        seconds, modules = now - self._time, self._modules
        found = ""
        if modules != self._looked:
            found = "modules"
        elif is_new:
            found = "stack"
        elif io - self._io >= BYTES:
            found = "input and output"
        elif cpu - self._cpu >= SHARE * seconds:
            found = "computation"
        elif state == "D":
            found = "disk"
        self._io, self._cpu, self._time, self._looked = io, cpu, now, modules
        return found

    def _counters(self) -> tuple[int, float, str]:
        """Bytes read and written, seconds of the processor, and the state of the thread; zeros if unknown."""
        folder = Path("/proc/self/task", str(self._native))
        try:
            io = dict(line.split(": ") for line in (folder / "io").read_text(encoding="ascii").splitlines())
        except (OSError, ValueError):  # a container may forbid it
            io = {}
        try:
            fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            cpu, state = (int(fields[11]) + int(fields[12])) / _TICKS, fields[0]
        except (OSError, ValueError, IndexError):
            cpu, state = 0.0, ""
        return int(io.get("rchar", 0)) + int(io.get("wchar", 0)), cpu, state


def _prefix(a: list[int], b: list[int]) -> list[int]:
    same = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:same]
