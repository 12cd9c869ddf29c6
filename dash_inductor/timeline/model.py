"""`Timeline`: who computed, waited and added when, whether the simulator says so or a GPU.  Standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from ..errors import ArgumentError

Kind = Literal["compute", "wait", "add"]


class Unit(NamedTuple):
    """The unit in which times are counted: the text behind a number, and the text at an axis."""

    symbol: str
    axis: str


MICROSECONDS = Unit("µs", "time in µs")

TIMES = ("start", "computed", "write", "written")
"""The fields of a `Step` that are times."""


class Step(NamedTuple):
    """One tile pair.  ``start <= computed <= write <= written``, in the unit of the timeline.

    Args:
        lane: which of `Timeline.lanes`.
        ticket: of the walk that it belongs to.
        head: which of `Timeline.heads`.
        kv, q: the tiles.
        rank: the place of this addition among those to the dq tile of (head, q).
        start, computed: when its products were computed.
        write, written: when its dq tile was added.  From `computed` on it waits for its turn.
    """

    lane: int
    ticket: int
    head: int
    kv: int
    q: int
    rank: int
    start: float
    computed: float
    write: float
    written: float


class Bar(NamedTuple):
    """The work of a lane for some time.

    Args:
        step: which of `Timeline.steps`; while a CTA waits for a buffer, the one that is computed next.
        track: 0 is the lane's own, 1 its writer's (see `Timeline.writer`).
    """

    step: int
    track: int
    kind: Kind
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A run of one schedule.

    Args:
        name: of the schedule, or of the recording.
        unit: the unit in which times are counted.
        lanes, heads: their names.
        steps: in any order.
        end: the end of the run; at least the end of every step.
        writer: a lane has two tracks, because a writer waits and adds while the next tile pair is computed.
        measured: whether it was recorded on a GPU.
        note: one line that says what is remarkable, for example why a run hangs.
        badge: a word or two that stand out beside the name, for example that the planner chooses it; may be empty.
    """

    name: str
    unit: Unit
    lanes: tuple[str, ...]
    heads: tuple[str, ...]
    steps: tuple[Step, ...]
    end: float
    writer: bool = False
    measured: bool = False
    note: str = ""
    badge: str = ""

    @cached_property
    def bars(self) -> tuple[Bar, ...]:
        """Everything that is drawn, lane by lane and in order of time; what takes no time is left out.

        Bars of a track do not overlap: of two additions at a time, the second is drawn when the first has ended.
        """
        return tuple(bar for bar in self._all_bars() if bar.end > bar.begin)

    def _all_bars(self) -> Iterator[Bar]:
        lanes: list[list[int]] = [[] for _ in self.lanes]
        for index, step in enumerate(self.steps):
            lanes[step.lane].append(index)
        for indices in lanes:
            indices.sort(key=lambda i: (self.steps[i].start, self.steps[i].written))
            free, last = 0.0, None  # when the writer is free, and the step before
            for i in indices:
                step = self.steps[i]
                if self.writer and last is not None and last.ticket == step.ticket:
                    yield Bar(i, 0, "wait", last.computed, step.start)
                yield Bar(i, 0, "compute", step.start, step.computed)
                yield Bar(i, int(self.writer), "wait", max(step.computed, free), step.write)
                yield Bar(i, int(self.writer), "add", max(step.write, free), step.written)
                free, last = max(free, step.written), step

    @cached_property
    def shares(self) -> dict[Kind, float]:
        """The share of the time of all lanes, from 0 to 1, that each kind of bar of the lane's own track takes.

        The rest is idle time.  With a writer, waiting is the time in which all of its buffers are taken.
        """
        total = self.end * len(self.lanes)
        kinds: dict[Kind, float] = {"compute": 0.0, "wait": 0.0, "add": 0.0}
        for bar in self.bars:
            if bar.track == 0:
                kinds[bar.kind] += bar.end - bar.begin
        return {kind: time / total if total else 0.0 for kind, time in kinds.items()}

    def in_unit(self, unit: Unit, factor: float) -> Timeline:
        """The same run with all times multiplied by `factor`."""
        steps = (s._replace(**{name: getattr(s, name) * factor for name in TIMES}) for s in self.steps)
        return replace(self, unit=unit, end=self.end * factor, steps=tuple(steps))


def ticks(end: float, most: int = 10) -> list[float]:
    """At most `most` + 1 round numbers from 0 to `end`, evenly spaced."""
    if end <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(end / most))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if end / (power * factor) <= most)
    return [i * step for i in range(int(end / step * (1 + 1e-9)) + 1)]


@dataclass(frozen=True)
class Picture:
    """Timelines that are drawn one below the other, on one scale of time.

    Args:
        title, subtitle: what is drawn.
        timelines: in the order in which they are drawn.
    """

    title: str
    subtitle: str
    timelines: tuple[Timeline, ...]

    @property
    def end(self) -> float:
        """The time at which the last run ends."""
        return max((t.end for t in self.timelines), default=0.0)

    @property
    def unit(self) -> Unit:
        """The unit of all times.

        Raises:
            ArgumentError: no timelines, or timelines in different units.
        """
        units = {t.unit for t in self.timelines}
        if len(units) != 1:
            raise ArgumentError("timelines", [t.unit.symbol for t in self.timelines], "timelines in one unit")
        return units.pop()
