"""The style of timeline pictures: colours and their meaning, and what is drawn if bars are too narrow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .model import Kind, Picture, Step, Timeline


class Hue(NamedTuple):
    """The two colours for a tile pair: for the bar of its computation, and for the bar of its addition to dQ."""

    compute: str
    add: str


HUES = (
    Hue("#a9c8ea", "#2f6db3"),
    Hue("#fbd0a0", "#d9730d"),
    Hue("#b5dfb0", "#3a8f35"),
    Hue("#f6b8b8", "#c93c45"),
    Hue("#d9c2ec", "#7d4bb0"),
    Hue("#a8dedb", "#1c8f8a"),
    Hue("#f3e19a", "#b08a00"),
    Hue("#dcc7b8", "#8a5a3b"),
)

RAMP = (
    Hue("#fbe89c", "#c9a400"),
    Hue("#d3e6a0", "#8fae3c"),
    Hue("#9fd6a8", "#4f9a5c"),
    Hue("#6bc3b3", "#258a79"),
    Hue("#47aabf", "#1b7388"),
    Hue("#3f8bbf", "#205d87"),
    Hue("#4a68ae", "#2c4581"),
    Hue("#4b4790", "#2f2c66"),
)
"""The colours of kv tiles, from the first to the last, if there are more q tiles than `HUES`."""

INK, FAINT, GRID, PAGE, WAIT = "#1f2328", "#6a737d", "#e3e6ea", "#ffffff", "#9aa1a9"


def ink_on(colour: str) -> str:
    """The text colour that is readable on a bar of this colour, given as ``#rrggbb``."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return INK if 0.3 * red + 0.59 * green + 0.11 * blue > 125 else "#ffffff"


MEANING: dict[Kind, str] = {
    "compute": "computes a tile pair",
    "wait": "waits for its semaphore",
    "add": "adds its dQ tile",
}


class Colours(NamedTuple):
    """The colours of a picture: each stands for a q tile, or for a range of kv tiles if there are too many q tiles.

    Args:
        hues: the colours.
        q_tiles: the number of q tiles, if colours stand for q tiles; else 0, and `hues` range over the kv
            tiles.
        kv_tiles: the number of kv tiles.
    """

    hues: tuple[Hue, ...]
    q_tiles: int
    kv_tiles: int

    @staticmethod
    def of(picture: Picture) -> Colours:
        """The colours for a picture: they stand for q tiles if there are enough hues, else for kv tiles."""
        q_tiles = 1 + max((step.q for t in picture.timelines for step in t.steps), default=0)
        kv_tiles = 1 + max((step.kv for t in picture.timelines for step in t.steps), default=0)
        return Colours(HUES, q_tiles, kv_tiles) if q_tiles <= len(HUES) else Colours(RAMP, 0, kv_tiles)

    def __call__(self, step: Step) -> int:
        """The index in `hues` of a tile pair's colour."""
        return step.q if self.q_tiles else step.kv * len(self.hues) // self.kv_tiles

    @property
    def used(self) -> int:
        """The number of colours of `hues` that the picture uses."""
        return self.q_tiles or min(len(self.hues), self.kv_tiles)

    @property
    def meaning(self) -> str:
        """What the colours stand for, in words: "q tile 0 to 7" or "kv tile 0 to 31"."""
        if self.q_tiles:
            return f"q tile 0 to {self.q_tiles - 1}"
        return f"kv tile 0 to {self.kv_tiles - 1}"


def label(timeline: Timeline, step: Step) -> str:
    """The text in a step's bar: the q tile, after a letter for the head if there are several heads."""
    return f"{'abcdefghijklmnopqrstuvwxyz'[step.head % 26] if len(timeline.heads) > 1 else ''}{step.q}"


def summary(timeline: Timeline) -> str:
    """A line about a run: its duration, and the shares of time for computing, adding and waiting."""
    if "hangs" in timeline.note:
        return timeline.note
    shares = timeline.shares
    parts = [f"{timeline.end:.4g} {timeline.unit.symbol}", f"computes {shares['compute']:.0%}"]
    if not timeline.writer and shares["add"]:
        parts.append(f"adds {shares['add']:.0%}")
    parts.append(f"waits {shares['wait']:.0%}")
    return " · ".join([*parts, timeline.note] if timeline.note else parts)


def shown(panels: Iterable[tuple[Timeline, bool]]) -> list[tuple[Kind, str]]:
    """The kinds of bars that occur in a picture, each with its meaning, for a legend.

    Args:
        panels: timelines, each with whether the tracks of its writers (see `Timeline.writer`) are drawn.
    """
    kinds = {bar.kind for t, writer in panels for bar in t.bars if writer or bar.track == 0}
    return [(kind, meaning) for kind, meaning in MEANING.items() if kind in kinds]


class Drawn(NamedTuple):
    """A rectangle to draw for one bar of a timeline, or for several that are merged because they are too narrow.

    Attributes:
        lane, track: where it is drawn.
        kind: the activity that it shows.
        colour: the index of its colours among the picture's `hues`.
        begin, end: its times.
        step: the index of its step; -1 for several bars.
    """

    lane: int
    track: int
    kind: Kind
    colour: int
    begin: float
    end: float
    step: int


def rectangles(timeline: Timeline, colours: Colours, columns: int, writer: bool) -> Iterator[Drawn]:
    """Yields the rectangles that draw a timeline in a static picture.

    A few bars are drawn individually.  If there are more than `MOST_BARS`, each column of a lane shows what takes most
    of its time, and equal neighbours are merged.

    Args:
        timeline: the run.
        colours: the colours of its steps.
        columns: the number of columns, for example pixels, for the whole run.
        writer: whether to draw what writers do.
    """
    steps = timeline.steps
    bars = [bar for bar in timeline.bars if writer or bar.track == 0]
    if len(bars) <= MOST_BARS:
        for bar in bars:
            step = steps[bar.step]
            yield Drawn(step.lane, bar.track, bar.kind, colours(step), bar.begin, bar.end, bar.step)
        return
    width = timeline.end / columns
    share: dict[tuple[int, int], list[dict[tuple[Kind, int], float]]] = {}
    for bar in bars:
        step = steps[bar.step]
        key, what = (step.lane, bar.track), (bar.kind, colours(step))
        if key not in share:
            share[key] = [{} for _ in range(columns)]
        row = share[key]
        for column in range(int(bar.begin / width), min(columns, int(bar.end / width) + 1)):
            time = min(bar.end, (column + 1) * width) - max(bar.begin, column * width)
            row[column][what] = row[column].get(what, 0.0) + time
    for (lane, track), row in sorted(share.items()):
        most = [*(_most(found, width) for found in row), None]
        begin = 0
        for column in range(columns):
            if most[column] != most[column + 1]:
                if (found := most[column]) is not None:
                    yield Drawn(lane, track, *found, begin * width, (column + 1) * width, -1)
                begin = column + 1


MOST_BARS = 2500
"""The maximum number of bars of a timeline that are drawn individually."""


def _most(found: dict[tuple[Kind, int], float], width: float) -> tuple[Kind, int] | None:
    """The activity that takes most of a column's time; None if the column is mostly idle."""
    if sum(found.values()) < width / 2:
        return None
    return max(found, key=lambda what: (found[what], what))
