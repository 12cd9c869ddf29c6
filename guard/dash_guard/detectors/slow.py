"""Finds ranks that compute slowly (not those that wait), and groups that transfer slowly.

All ranks wait for the slowest one, so their steps take equally long; they differ in how late they come to the
collectives of a step. On the CPU, a rank reports when it came, counted from the end of the step before, which all ranks
reach together. For a collective on GPUs it reports the duration: the last rank to come has the shortest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..report.findings import Finding
from ..transport.messages import Message
from . import wording
from .detector import Detector, Job

EXCESS, LAST, OF = 1.1, 6, 8
"""A rank is slow if it takes more than `EXCESS` times the median of its peers in `LAST` of the last `OF` steps."""
LEAST = 1.0
"""The smallest lateness that counts, in milliseconds, so that noise causes no finding."""
SPREAD = 3.0
"""A slow rank is later than this many times the median deviation of all ranks in the step."""
LINK = 1.5
"""A group transfers slowly if its shortest duration is above this many times the median of other groups."""

_PATIENCE = 2.5  # seconds that a step waits for ranks that have not reported it
_KEPT = 64  # steps that wait
_AT_ONCE = 8192  # ranks of steps that one call of `detect` compares; the next call follows in a fifth of a second
_SHOWN = 16
_FEW = 4  # ranks of which fewer have no spread

Matrix = NDArray[np.float64]


def lateness(came: Matrix) -> tuple[Matrix, Matrix]:
    """How late each rank is in a step, and at which collective it became late.

    The lateness of a rank at a collective is how much later it came than the median of the others. Where nobody waits
    between collectives, lateness adds up and counts at the last one; where all ranks wait, it is gone at the next
    collective and counts where it arose.

    Args:
        came: when ranks came to collectives, [..., ranks, collectives], in any unit.

    Returns:
        For each rank, [..., ranks]: the lateness in the same unit, and the index of the collective before which most
        of it arose.
    """
    late = came - _median_of_others(came)
    made = late.copy()
    made[..., 1:] -= np.maximum(late[..., :-1], 0)
    return np.maximum(late[..., -1], made.max(axis=-1)), made.argmax(axis=-1).astype(np.float64)


def _median_of_others(values: Matrix) -> Matrix:
    """The median of all other rows, for each row, [..., rows, columns]; there are at least two rows."""
    rows = values.shape[-2]
    middle = [(rows - 2) // 2] if rows % 2 == 0 else [(rows - 3) // 2, (rows - 1) // 2]  # among the others
    ordered = np.partition(values, sorted({place + more for place in middle for more in (0, 1)}), axis=-2)
    found = np.zeros_like(values)
    for place in middle:  # without a value that sorts before this place, the next value moves there
        here, after = ordered[..., place : place + 1, :], ordered[..., place + 1 : place + 2, :]
        found += np.where(values <= here, after, here)
    return found / len(middle)


class _Durations:
    """The durations of the collectives of one step on GPUs."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int], int] = {}  # of collectives, as they come
        self._rows: tuple[list[int], list[int], list[float]] = ([], [], [])

    def add(self, rank: int, rows: Sequence[Sequence[Any]]) -> None:
        """Add the collectives of a rank, each as (group, number, milliseconds)."""
        collectives, ranks, durations = self._rows
        for group, number, duration in rows:
            key = str(group), int(number)
            collectives.append(self._numbers.setdefault(key, len(self._numbers)))
            ranks.append(rank)
            durations.append(float(duration))

    def sets(self) -> list[tuple[NDArray[np.int64], Matrix]]:
        """Sets of ranks that share collectives, with the durations of these collectives in milliseconds.

        Returns:
            (ranks, int64 [sets, ranks]; durations, float64 [sets, ranks, collectives]) pairs.  Sets of equal size with
            equally many collectives are in one pair; ranks ascend in each set.
        """
        found = []
        collectives, ranks = (np.array(row, dtype=np.int64) for row in self._rows[:2])
        order = np.lexsort((ranks, collectives))
        collectives, ranks, durations = collectives[order], ranks[order], np.array(self._rows[2])[order]
        first = np.flatnonzero(np.diff(collectives, prepend=-1))
        sizes = np.diff(first, append=len(collectives))
        for size in np.unique(sizes[sizes > 1]).tolist():
            places = first[sizes == size][:, None] + np.arange(size)
            members, times = ranks[places], durations[places]
            columns: dict[bytes, list[int]] = {}  # collectives of one set
            for row in range(len(members)):
                columns.setdefault(members[row].tobytes(), []).append(row)
            for number in sorted(set(map(len, columns.values()))):
                rows = np.array([of for of in columns.values() if len(of) == number])
                found.append((members[rows[:, 0]], times[rows].swapaxes(1, 2)))
        return found


class Slow(Detector):
    """A detector of ranks that compute slowly and of groups of ranks between which transfers are slow."""

    kinds = frozenset({"times", "joined"})

    def __init__(self, job: Job, **settings: Any) -> None:
        super().__init__(job, **settings)
        self._steps: dict[int, dict[int, dict[str, Any]]] = {}
        self._durations: dict[int, _Durations] = {}
        self._since: dict[int, float] = {}
        self._history: dict[int, int] = {}  # of a rank: a bit for each of the last `OF` steps
        self._excess: dict[int, list[tuple[int, float, float, int]]] = {}
        self._links: dict[tuple[int, ...], int] = {}
        self._reported: set[object] = set()
        self._done = 0
        self._reporting: set[int] = set()
        self._loads: dict[int, tuple[float, int]] = {}  # of the machine of each rank, with its processors

    def take(self, message: Message, now: float) -> None:
        """Take the times of a rank's step, or the notice that a rank has joined."""
        if message.kind == "joined":
            self._history.pop(message.rank, None)
            self._reporting.discard(message.rank)
            if message.rank in self._excess:  # a restart: steps may be counted anew
                self._done = 0
                self._excess.clear()
            return
        self._reporting.add(message.rank)
        self._loads[message.rank] = _load(message.body.get("load"))
        if message.step <= self._done:
            return
        bodies = self._steps.setdefault(message.step, {})
        if message.rank not in bodies and message.body["kernels"]:
            self._durations.setdefault(message.step, _Durations()).add(message.rank, message.body["kernels"])
        bodies.setdefault(message.rank, message.body)
        self._since.setdefault(message.step, now)
        if len(self._steps) > _KEPT:
            self._forget(min(self._steps))

    def detect(self, now: float) -> list[Finding]:
        """Return findings about ranks and groups that have become slow, from steps that are complete or late."""
        found: list[Finding] = []
        left = _AT_ONCE
        for step in sorted(self._steps):
            if left <= 0:
                break
            complete = len(self._steps[step]) >= max(2, len(self._reporting), self.job.world)
            if complete or now - self._since[step] > _PATIENCE:
                bodies = self._steps[step]
                left -= len(bodies)
                durations = self._forget(step)
                self._done = max(self._done, step)
                found += self._step(step, bodies, durations)
        return found

    def excess(self) -> dict[int, float]:
        """For each rank that was slow in one of the last steps, how late it was in the latest slow one, in seconds."""
        return {rank: self._excess[rank][-1][1] / 1000 for rank in self._history if self._excess.get(rank)}

    def finish(self, now: float) -> list[Finding]:
        """Return the last findings, without waiting for ranks that have not reported their steps."""
        found: list[Finding] = []
        while self._steps:
            found += self.detect(now + _PATIENCE + 1)
        return found

    def _forget(self, step: int) -> _Durations | None:
        del self._steps[step], self._since[step]
        return self._durations.pop(step, None)

    def _step(self, step: int, bodies: Mapping[int, Mapping[str, Any]], durations: _Durations | None) -> list[Finding]:
        by_shape: dict[str, list[int]] = {}
        for rank, body in bodies.items():
            by_shape.setdefault(str(body["shape"]), []).append(rank)
        found: list[Finding] = []
        for peers in by_shape.values():
            if len(peers) > 1:
                found += self._peers(step, sorted(peers), bodies)
        if durations is not None:
            found += self._on_gpus(step, durations.sets(), bodies)
        return found

    def _peers(self, step: int, peers: list[int], bodies: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
        """Compare ranks with the same collectives on the CPU."""
        rows = [bodies[rank]["own"] for rank in peers]
        if not rows[0] or len({len(row) for row in rows}) > 1:
            return []
        return self.compare(step, peers, np.array(rows, dtype=np.float64))

    def compare(self, step: int, peers: Sequence[int], came: Matrix) -> list[Finding]:
        """Evaluate one step of ranks that do the same work.

        Args:
            step: the training step.
            peers: the ranks.
            came: when they came to the collectives of the step, [ranks, collectives], in milliseconds.

        Returns:
            Findings about ranks that are slow now and were not reported before.
        """
        late, where = lateness(came)
        return self._count(step, peers, late, np.full(len(peers), np.median(came[:, -1])), where)

    def _on_gpus(
        self, step: int, sets: list[tuple[NDArray[np.int64], Matrix]], bodies: Mapping[int, Mapping[str, Any]]
    ) -> list[Finding]:
        """Compare sets of ranks (`_Durations.sets`); the rank that came last has the shortest duration."""
        if not sets:
            return []
        peers = np.unique(np.concatenate([groups.ravel() for groups, _ in sets]))
        late, places = _latest(sets, peers)
        base = np.median([float(bodies[rank]["total"]) for rank in peers.tolist()]) - late.max()
        found = self._count(step, peers.tolist(), late, np.full(len(peers), max(base, 1e-3)), places)
        for groups, durations in sets:
            found += self._transfers(step, groups, durations)
        return found

    def _count(self, step: int, peers: Sequence[int], late: Matrix, base: Matrix, where: Matrix) -> list[Finding]:
        """Count a step of ranks with the same work, and report those that were slow often enough."""
        slow = (late > (EXCESS - 1) * base) & (late > LEAST) & (late > _usual(late))
        found = []
        many = max(1, len(peers) // 4)
        above = slow.nonzero()[0].tolist()
        if len(above) > many:  # the work of many ranks differs, so that no rank is an outlier
            above = []
        if self._history:
            those = set(peers)
            for rank in [rank for rank in self._history if rank in those]:
                self._history[rank] = self._history[rank] << 1 & (1 << OF) - 1
        for place in above:
            rank = peers[place]
            self._history[rank] = self._history.get(rank, 0) | 1
            self._excess.setdefault(rank, []).append((step, float(late[place]), float(base[place]), int(where[place])))
            del self._excess[rank][:-OF]
            if self._history[rank].bit_count() >= LAST and rank not in self._reported:
                self._reported.add(rank)
                found.append(rank)
        for rank in [rank for rank, history in self._history.items() if not history]:
            del self._history[rank]
            self._reported.discard(rank)
        return [self._finding(rank, step, len(peers)) for rank in found]

    def _finding(self, rank: int, step: int, peers: int) -> Finding:
        steps = self._excess[rank]
        late = float(np.median([late for _, late, _, _ in steps]))
        base = float(np.median([base for _, _, base, _ in steps]))
        place = int(np.median([where for *_, where in steps]))
        load, processors = self._loads.get(rank, (0.0, 0))
        machine = f"; the load of its machine is {load:.1f} on {processors} processors" if processors else ""
        busy = " first: more processes want a processor there than there are" if load > processors > 0 else ""
        return Finding(
            "slow",
            "suspect",
            f"rank {rank} is slow or has more work: it comes {late:.1f} ms late to collectives of a step, "
            f"{1 + late / base:.2f} times the {base:.1f} ms of its {peers - 1} peers, in "
            f"{self._history[rank].bit_count()} of the last {OF} steps; most of it before collective "
            f"{place + 1}{machine}",
            f"Look at other processes there{busy}; at clocks and temperature, and whether its inputs are longer.",
            ranks=(rank,),
            step=step,
            evidence={
                "late_ms": round(late, 2),
                "peers_ms": round(base, 2),
                "collective": place + 1,
                "load": load,
                "processors": processors,
                "steps": [[number, round(late, 2), round(base, 2)] for number, late, base, _ in steps],
            },
        )

    def _transfers(self, step: int, groups: NDArray[np.int64], durations: Matrix) -> list[Finding]:
        """Compare groups of equal size with equally many collectives; their shortest durations are those of the
        transfer.
        """
        if len(groups) < 3:
            return []
        times = np.median(durations.min(axis=1), axis=1, keepdims=True)
        ratios = (times / np.maximum(_median_of_others(times), 1e-6))[:, 0]
        above = (ratios > LINK).nonzero()[0].tolist()
        if len(above) > max(1, len(groups) // 4):
            above = []
        if self._links:
            those = set(map(tuple, groups.tolist()))
            for group in those.intersection(self._links):
                self._links[group] = self._links[group] << 1 & (1 << OF) - 1
        found = []
        for place in above:
            group = tuple(groups[place].tolist())
            self._links[group] = self._links.get(group, 0) | 1
            if self._links[group].bit_count() >= LAST and ("link", group) not in self._reported:
                self._reported.add(("link", group))
                found.append(self._link(group, step, float(times[place, 0]), float(ratios[place]), len(groups)))
        for group in [group for group, history in self._links.items() if not history]:
            del self._links[group]
        return found

    def _link(self, group: tuple[int, ...], step: int, time: float, ratio: float, groups: int) -> Finding:
        hosts = tuple(dict.fromkeys(self.job.hosts.get(rank, "") for rank in group))
        return Finding(
            "link",
            "suspect",
            f"collectives among {wording.ranks(group)} take {ratio:.2f} times as long as those of {groups - 1} groups "
            f"of the same size ({time:.2f} ms), whoever comes last: the link between {', '.join(hosts[:8])} is slow",
            "run nccl-tests between these hosts, and look at the errors of their ports",
            step=step,
            hosts=hosts[:_SHOWN],
            groups=(group,),
            cause="network",
            evidence={"shortest_ms": round(time, 3), "ratio": round(ratio, 2)},
        )


def _load(raw: Any) -> tuple[float, int]:
    """The load of a machine and its processors, as a rank has sent them; zeros if it has not."""
    if isinstance(raw, list | tuple) and len(raw) == 2 and type(raw[1]) is int and isinstance(raw[0], float | int):
        return max(0.0, float(raw[0])), max(0, raw[1])
    return 0.0, 0


def _usual(late: Matrix) -> float:
    """The usual lateness in milliseconds: ranks that share processors come early and late by turns."""
    return SPREAD * float(np.median(np.abs(late))) if len(late) >= _FEW else 0.0


def _latest(sets: Sequence[tuple[NDArray[np.int64], Matrix]], peers: NDArray[np.int64]) -> tuple[Matrix, Matrix]:
    """For each rank, [peers]: its largest lateness by the durations of collectives, and the number of that
    collective.
    """
    who, by, where = [], [], []
    for groups, durations in sets:
        late, place = lateness(-durations)
        who.append(np.searchsorted(peers, groups).ravel())
        by.append(late.ravel())
        where.append(place.ravel())
    rows, late, place = np.concatenate(who), np.concatenate(by), np.concatenate(where)
    order = np.argsort(late, kind="stable")  # of equal rows the last one counts
    worst, at = np.zeros(len(peers)), np.zeros(len(peers))
    worst[rows[order]] = np.maximum(late[order], 0)
    at[rows[order]] = place[order]
    return worst, at
