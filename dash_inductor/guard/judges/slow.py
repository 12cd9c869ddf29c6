"""Who is slow, in computing and not in waiting; and which group transfers slowly.

All ranks wait for the slowest one, so that their steps take equally long: what differs is how late they come to the
collectives of a step.  On the CPU a rank tells when it came, counted from the end of the step before, which all ranks
reach together.  Of a collective on GPUs it tells the duration: who came last has the shortest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import wording
from ..findings import Finding
from ..judge import Job, Judge
from ..messages import Message

EXCESS, LAST, OF = 1.1, 6, 8
"""A rank is slow that is above `EXCESS` times the median of its peers in `LAST` of the last `OF` steps."""
LEAST = 1.0
"""Milliseconds by which a rank must be late at least, so that noise is no finding."""
LINK = 1.5
"""A group transfers slowly if its shortest duration is above so many times the median of other groups."""

_PATIENCE = 2.5  # seconds that a step waits for ranks that have not told of it
_KEPT = 64  # steps that wait
_AT_ONCE = 8192  # ranks of steps that one judgement looks at; the next one is a fifth of a second away
_SHOWN = 16

Matrix = NDArray[np.float64]


def lateness(came: Matrix) -> tuple[Matrix, Matrix]:
    """By how much each rank is late, and where it became so.

    A rank is late at a collective by what it came after the median of the others.  Where nobody waits between
    collectives, lateness stays, and counts at the last one; where all wait, it is gone at the next one, and counts
    where it was made.

    Args:
        came: when ranks came to collectives, [ranks, collectives], in any unit.

    Returns:
        Of each rank, [ranks]: the lateness, in the same unit, and the number of the collective before which most of it
        was made.
    """
    late = came - _median_of_others(came)
    made = late.copy()
    made[:, 1:] -= np.maximum(late[:, :-1], 0)
    return np.maximum(late[:, -1], made.max(axis=1)), made.argmax(axis=1).astype(np.float64)


def _median_of_others(values: Matrix) -> Matrix:
    """The median of all rows but one, for each row; of many rows, that of all of them is as good."""
    if len(values) > 32:
        return np.broadcast_to(np.median(values, axis=0), values.shape)
    rows = [np.median(np.delete(values, row, axis=0), axis=0) for row in range(len(values))]
    return np.stack(rows)


class Slow(Judge):
    """Slow ranks, and slow links."""

    kinds = frozenset({"times", "joined"})

    def __init__(self, job: Job, **settings: Any) -> None:
        super().__init__(job, **settings)
        self._steps: dict[int, dict[int, dict[str, Any]]] = {}
        self._since: dict[int, float] = {}
        self._history: dict[int, int] = {}  # of a rank: a bit for each of the last `OF` steps
        self._excess: dict[int, list[tuple[int, float, float, int]]] = {}
        self._links: dict[tuple[int, ...], int] = {}
        self._told: set[object] = set()
        self._done = 0
        self._reporting: set[int] = set()

    def take(self, message: Message, now: float) -> None:
        """A message has come."""
        if message.kind == "joined":
            self._history.pop(message.rank, None)
            self._reporting.discard(message.rank)
            if message.rank in self._excess:  # a restart: steps may be counted anew
                self._done = 0
                self._excess.clear()
            return
        self._reporting.add(message.rank)
        if message.step <= self._done:
            return
        self._steps.setdefault(message.step, {})[message.rank] = message.body
        self._since.setdefault(message.step, now)
        if len(self._steps) > _KEPT:
            self._forget(min(self._steps))

    def judge(self, now: float) -> list[Finding]:
        """What is new."""
        found: list[Finding] = []
        room = _AT_ONCE
        for step in sorted(self._steps):
            if room <= 0:
                break
            complete = len(self._steps[step]) >= max(2, len(self._reporting), self.job.world)
            if complete or now - self._since[step] > _PATIENCE:
                bodies = self._steps[step]
                room -= len(bodies)
                self._forget(step)
                self._done = max(self._done, step)
                found += self._step(step, bodies)
        return found

    def excess(self) -> dict[int, float]:
        """Seconds of lateness in the last step in which a rank was slow, of those that were so lately."""
        return {rank: self._excess[rank][-1][1] / 1000 for rank in self._history if self._excess.get(rank)}

    def finish(self, now: float) -> list[Finding]:
        """What is new."""
        found: list[Finding] = []
        while self._steps:
            found += self.judge(now + _PATIENCE + 1)
        return found

    def _forget(self, step: int) -> None:
        del self._steps[step], self._since[step]

    def _step(self, step: int, bodies: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
        by_shape: dict[str, list[int]] = {}
        for rank, body in bodies.items():
            by_shape.setdefault(str(body["shape"]), []).append(rank)
        found: list[Finding] = []
        for peers in by_shape.values():
            if len(peers) > 1:
                found += self._peers(step, sorted(peers), bodies)
        kernels = {rank: body["kernels"] for rank, body in bodies.items() if body["kernels"]}
        if kernels:
            found += self._on_gpus(step, kernels, bodies)
        return found

    def _peers(self, step: int, peers: list[int], bodies: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
        """Ranks of one shape on the CPU."""
        rows = [bodies[rank]["own"] for rank in peers]
        if not rows[0] or len({len(row) for row in rows}) > 1:
            return []
        return self.compare(step, peers, np.array(rows, dtype=np.float64))

    def compare(self, step: int, peers: Sequence[int], came: Matrix) -> list[Finding]:
        """Judge one step of ranks with the same work.

        Args:
            step: of training.
            peers: the ranks.
            came: when they came to the collectives of the step, [ranks, collectives], in milliseconds.
        """
        late, where = lateness(came)
        return self._count(step, peers, late, np.full(len(peers), np.median(came[:, -1])), where)

    def _on_gpus(
        self, step: int, kernels: Mapping[int, Sequence[Any]], bodies: Mapping[int, Mapping[str, Any]]
    ) -> list[Finding]:
        """Ranks of one process group; the rank that came last has the shortest duration."""
        durations: dict[tuple[str, int], dict[int, float]] = {}
        for rank, rows in kernels.items():
            for group, number, duration in rows:
                durations.setdefault((str(group), int(number)), {})[rank] = float(duration)
        sets: dict[tuple[int, ...], list[dict[int, float]]] = {}
        for of in durations.values():
            if len(of) > 1:
                sets.setdefault(tuple(sorted(of)), []).append(of)
        found: list[Finding] = []
        worst: dict[int, tuple[float, float]] = {}
        for ranks, columns in sets.items():
            late, where = lateness(-np.array([[of[rank] for of in columns] for rank in ranks], dtype=np.float64))
            for rank, value, place in zip(ranks, late.tolist(), where.tolist(), strict=True):
                if value > worst.get(rank, (0.0, 0.0))[0]:
                    worst[rank] = value, place
        peers = sorted({rank for ranks in sets for rank in ranks})
        if peers:
            late = np.array([worst.get(rank, (0.0, 0.0))[0] for rank in peers])
            places = np.array([worst.get(rank, (0.0, 0.0))[1] for rank in peers])
            base = np.median([float(bodies[rank]["total"]) for rank in peers]) - late.max()
            found += self._count(step, peers, late, np.full(len(peers), max(base, 1e-3)), places)
        return found + self._transfers(step, sets)

    def _count(self, step: int, peers: Sequence[int], late: Matrix, base: Matrix, where: Matrix) -> list[Finding]:
        """Count a step for ranks of one kind, and name those that were slow often enough."""
        slow = (late > (EXCESS - 1) * base) & (late > LEAST)
        found = []
        many = max(1, len(peers) // 4)
        above = slow.nonzero()[0].tolist()
        if len(above) > many:  # the work differs, or the time of all: nobody is slower than the others
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
            if self._history[rank].bit_count() >= LAST and rank not in self._told:
                self._told.add(rank)
                found.append(rank)
        for rank in [rank for rank, history in self._history.items() if not history]:
            del self._history[rank]
            self._told.discard(rank)
        return [self._finding(rank, step, len(peers)) for rank in found]

    def _finding(self, rank: int, step: int, peers: int) -> Finding:
        steps = self._excess[rank]
        late = float(np.median([late for _, late, _, _ in steps]))
        base = float(np.median([base for _, _, base, _ in steps]))
        place = int(np.median([where for *_, where in steps]))
        return Finding(
            "slow",
            "suspect",
            f"rank {rank} is slow or has more work: it comes {late:.1f} ms late to collectives of a step, "
            f"{1 + late / base:.2f} times the {base:.1f} ms of its {peers - 1} peers, in "
            f"{self._history[rank].bit_count()} of the last {OF} steps; most of it before collective {place + 1}",
            "Look at clocks, temperature and other processes there, and whether its inputs are longer",
            ranks=(rank,),
            step=step,
            evidence={
                "late_ms": round(late, 2),
                "peers_ms": round(base, 2),
                "collective": place + 1,
                "steps": [[number, round(late, 2), round(base, 2)] for number, late, base, _ in steps],
            },
        )

    def _transfers(self, step: int, sets: Mapping[tuple[int, ...], Sequence[Mapping[int, float]]]) -> list[Finding]:
        """Groups of equal size with equally many collectives: their shortest durations are those of the transfer."""
        alike: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        for ranks, columns in sets.items():
            alike.setdefault((len(ranks), len(columns)), []).append(ranks)
        found = []
        for groups in alike.values():
            if len(groups) < 3:
                continue
            shortest = np.array([[min(of.values()) for of in sets[group]] for group in groups])
            times = np.median(shortest, axis=1, keepdims=True)
            ratios = (times / np.maximum(_median_of_others(times), 1e-6))[:, 0].tolist()
            slow = [group for group, ratio in zip(groups, ratios, strict=True) if ratio > LINK]
            for group in groups:
                bit = int(group in slow and len(slow) <= max(1, len(groups) // 4))
                self._links[group] = (self._links.get(group, 0) << 1 | bit) & (1 << OF) - 1
                if self._links[group].bit_count() >= LAST and ("link", group) not in self._told:
                    self._told.add(("link", group))
                    place = groups.index(group)
                    found.append(self._link(group, step, float(times[place, 0]), ratios[place], len(groups)))
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
            cause="wire",
            evidence={"shortest_ms": round(time, 3), "ratio": round(ratio, 2)},
        )
