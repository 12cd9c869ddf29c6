"""`Timeline`: which worker computed, waited and added when, in a simulation or on a GPU.  Standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from ..errors import ArgumentError

Kind = Literal["compute", "wait", "add"]


class Unit(NamedTuple):
    """The unit of a timeline's times: its symbol after a number, and the label of the time axis."""

    symbol: str
    axis: str


MICROSECONDS = Unit("µs", "time in µs")

TIMES = ("start", "computed", "write", "written")
"""The names of the fields of a `Step` that are times."""


class Step(NamedTuple):
    """The processing of one (q tile, kv tile) pair by a worker.

    Times are in the unit of the timeline, with ``start <= computed <= write <= written``.

    Args:
        lane: the index in `Timeline.lanes`.
        work_id: the work id of its tile schedule.
        head: the index in `Timeline.heads`.
        kv, q: the tile indices.
        rank: the position of its addition among those to the dq tile of (head, q).
        start, computed: the times at which its matrix products begin and end.
        write, written: the times at which the addition of its dq tile begins and ends.  It waits for its semaphore from
            `computed` to `write`.
    """

    lane: int
    work_id: int
    head: int
    kv: int
    q: int
    rank: int
    start: float
    computed: float
    write: float
    written: float


class Bar(NamedTuple):
    """What a lane does during an interval of time, as one bar of a picture.

    Args:
        step: the index in `Timeline.steps`; while a CTA waits for a buffer, that of the next step.
        track: 0 for the lane itself, 1 for its writer (see `Timeline.writer`).
        kind: "compute", "wait" (for a semaphore or a buffer) or "add" (of dQ).
        begin, end: the interval, in the unit of the timeline.
    """

    step: int
    track: int
    kind: Kind
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each worker of one run of a schedule computed, waited and added.

    Args:
        name: the name of the schedule or of the recording.
        unit: the unit of all times.
        lanes, heads: the names of the lanes (workers, or SMs if recorded) and of the query heads.
        steps: the steps, in any order.
        end: the end of the run, not before the end of any step.
        writer: whether lanes have a second track, for a writer that waits and adds while the next tile pair is
            computed.
        measured: whether it was recorded on a GPU.
        note: a one-line remark, for example why a run hangs; may be empty.
        badge: a short label next to the name, for example that the planner chose it; may be empty.
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
        """The bars to draw, sorted by lane and time; bars of no duration are left out.

        Bars of one track (a lane, or its writer) do not overlap: if two additions do, the second is drawn after the
        end of the first.
        """
        return tuple(bar for bar in self._all_bars() if bar.end > bar.begin)

    def _all_bars(self) -> Iterator[Bar]:
        lanes: list[list[int]] = [[] for _ in self.lanes]
        for index, step in enumerate(self.steps):
            lanes[step.lane].append(index)
        for indices in lanes:
            indices.sort(key=lambda i: (self.steps[i].start, self.steps[i].written))
            free, last = 0.0, None  # the time from which the writer is free, and the previous step
            for i in indices:
                step = self.steps[i]
                if self.writer and last is not None and last.work_id == step.work_id:
                    yield Bar(i, 0, "wait", last.computed, step.start)
                yield Bar(i, 0, "compute", step.start, step.computed)
                yield Bar(i, int(self.writer), "wait", max(step.computed, free), step.write)
                yield Bar(i, int(self.writer), "add", max(step.write, free), step.written)
                free, last = max(free, step.written), step

    @cached_property
    def shares(self) -> dict[Kind, float]:
        """The fraction of the lanes' total time, from 0 to 1, for each kind of bar; the rest is idle time.

        Only the lanes' own tracks count, not those of writers.  With a writer, a lane waits while no buffer is free.
        """
        total = self.end * len(self.lanes)
        kinds: dict[Kind, float] = {"compute": 0.0, "wait": 0.0, "add": 0.0}
        for bar in self.bars:
            if bar.track == 0:
                kinds[bar.kind] += bar.end - bar.begin
        return {kind: time / total if total else 0.0 for kind, time in kinds.items()}

    def in_unit(self, unit: Unit, factor: float) -> Timeline:
        """Returns the same timeline with another unit and all times multiplied by `factor`."""
        steps = (s._replace(**{name: getattr(s, name) * factor for name in TIMES}) for s in self.steps)
        return replace(self, unit=unit, end=self.end * factor, steps=tuple(steps))


def ticks(end: float, most: int = 10) -> list[float]:
    """Returns at most `most` + 1 evenly spaced round numbers from 0 to `end`."""
    if end <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(end / most))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if end / (power * factor) <= most)
    return [i * step for i in range(int(end / step * (1 + 1e-9)) + 1)]


@dataclass(frozen=True)
class Picture:
    """Timelines that are drawn one below the other, with a common time axis.

    Args:
        title, subtitle: the headings.
        timelines: the timelines, from top to bottom.
    """

    title: str
    subtitle: str
    timelines: tuple[Timeline, ...]

    @property
    def end(self) -> float:
        """The time at which the last of the timelines ends."""
        return max((t.end for t in self.timelines), default=0.0)

    @property
    def unit(self) -> Unit:
        """The common unit of all timelines.

        Raises:
            ArgumentError: there are no timelines, or they have different units.
        """
        units = {t.unit for t in self.timelines}
        if len(units) != 1:
            raise ArgumentError("timelines", [t.unit.symbol for t in self.timelines], "timelines in one unit")
        return units.pop()
