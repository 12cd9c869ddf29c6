"""Keeps what the monitor knows about every rank: its last heartbeat, its shutdown notice and its process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..report.findings import LENGTH
from ..shared.heartbeat import PERIOD, unpacked
from ..transport.messages import Message
from ..upstream.group_names import OWN
from .detector import Job

KINDS = frozenset({"joined", "left", "heartbeat", "groups", "process", "facts"})

STALL, STALL_STEPS = 3.0, 4.0
"""A rank counts as stuck after this many seconds, or this many median steps if that is longer."""
SILENT = 3 * PERIOD
"""Seconds without a heartbeat after which a rank counts as silent, and without work after which it does nothing."""
SPINS = 300.0
"""Seconds after which a rank that only computes in one place, or only waits for a disk, no longer counts as working."""
START = 60.0
"""Seconds that a rank may make no progress before its second step: it compiles and reads its first data."""

_AFTER = 2 * PERIOD  # seconds after the monitor was away in which it learns what has happened meanwhile
_GROUPS = 4096  # of one rank
_WAITS = 1 << 16  # that are remembered, to be shared


class Place(NamedTuple):
    """A collective that ranks wait in.

    Attributes:
        group: the name of its process group.
        members: the index of the set of its members in `Roster.sets`.
        number: its number in the group, from 1; 0 for sends and receives.
    """

    group: str
    members: int
    number: int

    def words(self, operation: str) -> str:
        """A description of the collective for people, such as ``all_reduce 85 of group 0``."""
        if self.group == OWN:
            return "an exchange of the guard between two steps"
        return f"{operation or 'collective'} {self.number or ''} of group {self.group}".replace("  ", " ")


Waits = tuple[tuple[Place, str, str], ...]
"""The first open collective of each group of a rank, with its operation and operands."""


@dataclass(slots=True)
class State:
    """The state of one rank, as the monitor knows it; times are in seconds of the monitor's monotonic clock.

    Attributes:
        heartbeat: when the last heartbeat arrived.
        changed: when the last heartbeat arrived that showed progress: another step, or a collective entered or
            completed.
        worked: when the last heartbeat arrived that showed work beside collectives, see `process.work`.
        moved: the same, without work that may be a hang too: a loop that never ends, or a disk that does not answer.
        frame: the line of the program that the rank was last in.
        busy: the function of the program that it has been in since `changed`, with its line.
        phase: the phase that the program has named, such as "compile"; "" for none.
        limit: seconds without progress after which the rank counts as stuck.
        groups: by process group, the last collectives entered and completed, as `process.flight.waits` returns them.
        open: the collectives that the rank waits in; ranks that wait in the same collectives share one object.
        pairs: open sends and receives, as `process.flight.pairs` returns them.
        members: by process group, the index of its set of members in `Roster.sets`.
        left: whether the rank has sent its shutdown notice.
        process: "", "stopped", "waiting for a disk" or "ended", if a wrapper or monitor on its node has reported it.
        status: the status of a process that has ended, as `os.waitpid` returns it; None if unknown.
        gone: when the rank left, or its process ended; None before.
    """

    rank: int
    host: str = ""
    node: str = ""
    pid: int = 0
    step: int = 0
    heartbeat: float = 0.0
    changed: float = 0.0
    worked: float = 0.0
    moved: float = 0.0
    frame: str = ""
    busy: str = ""
    phase: str = ""
    limit: float = START
    open: Waits = ()
    groups: dict[str, list[Any]] = field(default_factory=dict)
    pairs: list[list[Any]] = field(default_factory=list)
    members: dict[str, int] = field(default_factory=dict)
    left: bool = False
    process: str = ""
    status: int | None = None
    gone: float | None = None

    def there(self) -> bool:
        """Whether the rank still takes part: it has not left and its process has not ended."""
        return not self.left and self.process != "ended"

    def works(self, now: float) -> bool:
        """Whether the rank has been seen to work a short time ago, though it enters no collective."""
        return now - self.worked < SILENT


class Roster:
    """The states of all ranks that have ever joined.

    Attributes:
        states: the `State` of each rank, by rank.
        sets: sets of ranks that form process groups; each is kept once.
        ending: whether the wrapper was asked to end the job.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.states = job, dict[int, State]()
        self.sets, self.ending = list[tuple[int, ...]](), False
        self._back = -_AFTER  # when the monitor last came back
        self._processes: dict[tuple[str, int], int] = {}
        self._numbers: dict[tuple[int, ...], int] = {}  # of sets, by what they are packed into
        self._waits: dict[Waits, Waits] = {}

    def take(self, message: Message, now: float) -> None:
        """Update what is known of a rank from a message of one of `KINDS`, for example a heartbeat."""
        body = message.body
        if message.kind == "process":
            self._process(body, now)
            return
        if message.kind == "joined":
            self._join(message.rank, body, now)
        state = self.states.get(message.rank)
        if state is None:
            return
        if message.kind == "facts":
            self.job.gpus[message.rank] = str(body.get("device", ""))[:LENGTH]
        elif message.kind == "left":
            state.left = True
            state.gone = now if state.gone is None else state.gone
        elif message.kind == "groups" and len(state.members) < _GROUPS:
            packed = tuple(int(rank) for rank in body["ranks"])
            if packed not in self._numbers:
                self.sets.append(unpacked(packed))
                self._numbers[packed] = len(self.sets) - 1
            state.members[str(body["name"])] = self._numbers[packed]
        elif message.kind == "heartbeat":
            self._heartbeat(state, message, now)

    def _join(self, rank: int, body: dict[str, Any], now: float) -> None:
        state = State(rank, str(body.get("host", ""))[:LENGTH], str(body.get("node", "")), int(body.get("pid", 0)))
        state.heartbeat = state.changed = now
        self.states[rank] = state
        self._processes[state.node, state.pid] = rank
        self.job.world = max(self.job.world, int(body.get("world", 1)))
        self.job.hosts[rank] = state.host

    def _process(self, body: dict[str, Any], now: float) -> None:
        if body.get("ending"):
            self.ending = True
        if body.get("away"):
            self._back = now
        state = self.states.get(self._processes.get((str(body.get("node")), int(body.get("pid", 0))), -1))
        if state is None or state.pid != body.get("pid"):
            return
        state.process = str(body.get("state", ""))
        if state.process == "ended":
            status = body.get("status")
            state.status = status if isinstance(status, int) else None
            state.gone = now if state.gone is None else min(state.gone, now)
            if state.status is None and now - self._back < _AFTER:
                state.left = True  # nobody has seen how it ended, and its shutdown notice had nobody to take it

    def _heartbeat(self, state: State, message: Message, now: float) -> None:
        """Take a heartbeat of a rank."""
        body = message.body
        groups: dict[str, list[Any]] = {
            str(name): [int(of[0]), int(of[1]), str(of[2]), str(of[3])] for name, of in body["groups"].items()
        }
        if message.step != state.step or groups != state.groups:
            state.changed = max(
                state.heartbeat, now - max(0.0, float(body["idle"]))
            )  # it has moved since its last heartbeat
            waits = tuple(
                (Place(name, members, of[1] + 1), of[2], of[3])
                for name, of in groups.items()
                if of[0] > of[1] and (members := state.members.get(name)) is not None
            )
            if len(self._waits) > _WAITS:
                self._waits.clear()
            state.open = self._waits.setdefault(waits, waits)
        state.heartbeat, state.step, state.groups = now, message.step, groups
        state.pairs = [[str(group), str(way), int(peer)] for group, way, peer in body["pairs"]]
        state.frame, state.phase = str(body["frame"])[:LENGTH], str(body["phase"])[:LENGTH]
        state.busy, work = str(body.get("busy", ""))[:LENGTH], body.get("work")
        if work in ("stack", "modules", "input and output"):
            state.moved = state.worked = now
        elif work and now - max(state.moved, state.changed) < SPINS:
            state.worked = now
        state.limit = START if state.step < 2 else max(STALL, STALL_STEPS * float(body["median"]))
