"""The states of the ranks' processes, as Linux reports them: running, stopped, waiting for a disk, or ended and how."""

from __future__ import annotations

import functools
import os
import select
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

STOPPED, DISK, ENDED = "stopped", "waiting for a disk", "ended"
"""The states that are reported; all other states are ""."""

_STATES = {"T": STOPPED, "t": STOPPED, "D": DISK, "Z": ENDED, "X": ENDED}


@dataclass(frozen=True)
class State:
    """The state of a process.

    Attributes:
        pid: the process id.
        state: `STOPPED`, `DISK`, `ENDED`, or "" for any other state.
        status: the status of a process that has ended, as `os.waitpid` returns it; None if it is unknown.
    """

    pid: int
    state: str
    status: int | None = None


@functools.cache
def node() -> str:
    """An identifier of this process's PID namespace: of a container, or of a machine since its boot; "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def load() -> tuple[float, int]:
    """How many processes have wanted a processor in the last minute, and the processors that this process may use."""
    try:
        return round(os.getloadavg()[0], 1), len(os.sched_getaffinity(0))
    except (OSError, AttributeError):
        return 0.0, 0


def words(status: int) -> str:
    """Describes how a process has ended: ``signal SIGKILL`` or ``exit status 1``.

    Args:
        status: as `os.waitpid` returns it.
    """
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return f"signal {signal.Signals(number).name}"
        except ValueError:
            return f"signal {number}"
    return f"exit status {os.WEXITSTATUS(status)}"


def descendants(root: int) -> set[int]:
    """The ids of all processes that process `root` has started, directly or indirectly."""
    parents: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, new = set[int](), [root]
    while new:
        new = [child for parent in new for child in parents.get(parent, []) if child not in found]
        found.update(new)
    return found


class Processes:
    """Watches processes of this node, whichever process has started them; `wait` returns at once when one ends."""

    def __init__(self) -> None:
        self._states: dict[int, str] = {}
        self._descriptors: dict[int, int] = {}
        self._ends = select.poll()

    def watch(self, pids: Iterable[int]) -> None:
        """Also watch the processes with these ids."""
        for pid in pids:
            if pid in self._states:
                continue
            self._states[pid] = ""
            try:
                descriptor = os.pidfd_open(pid)
            except (OSError, AttributeError):  # it has ended, or there are too many, or this is an old kernel
                continue
            self._descriptors[pid] = descriptor
            self._ends.register(descriptor, select.POLLIN)

    def changed(self) -> list[State]:
        """The new states of processes whose state changed since the last call; an ended process is returned once."""
        changed = []
        for pid, before in tuple(self._states.items()):
            fields = _stat(pid)
            state = _STATES.get(fields[0], "") if fields else ENDED
            if state == before:
                continue
            self._states[pid] = state
            changed.append(State(pid, state, _status(fields) if state == ENDED else None))
            if state == ENDED:
                self._forget(pid)
        return changed

    def wait(self, seconds: float) -> None:
        """Wait until a process ends, for `seconds` at most."""
        self._ends.poll(seconds * 1000)

    def close(self) -> None:
        """Stop watching all processes."""
        for pid in tuple(self._states):
            self._forget(pid)

    def _forget(self, pid: int) -> None:
        del self._states[pid]
        if (descriptor := self._descriptors.pop(pid, None)) is not None:
            self._ends.unregister(descriptor)
            os.close(descriptor)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; [] if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _status(fields: list[str]) -> int | None:
    """The exit status of a zombie; None if it is unknown. The kernel shows 0 to processes that may not read it."""
    return int(fields[49]) if len(fields) > 49 and fields[0] == "Z" else None
