"""A picture as an interactive page: one file without requests to anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .model import Picture, Timeline
from .style import HUES, MEANING, RAMP, summary

_END = 1_000_000
"""The end of the longest run, as the page counts time: finer than any screen."""


def html(picture: Picture) -> str:
    """The page: schedules can be switched on and off, time zoomed, and hovering a bar names its tile pair.

    Raises:
        ArgumentError: timelines in different units.
    """
    found = {
        "title": picture.title,
        "subtitle": picture.subtitle,
        "symbol": picture.unit.symbol,
        "axis": picture.unit.axis,
        "end": picture.end or 1.0,
        "meaning": MEANING,
        "hues": HUES,
        "ramp": RAMP,
        "head": picture.head,
        "rows": picture.rows,
        "timelines": [_timeline(t, picture.end or 1.0) for t in picture.timelines],
    }
    text = json.dumps(found, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    page = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    return page.replace(">DATA<", f">{text}<", 1)


def _timeline(t: Timeline, end: float) -> dict[str, Any]:
    return {
        "name": t.name,
        "badge": t.badge,
        "summary": summary(t),
        "lanes": t.lanes,
        "heads": t.heads,
        "writer": t.writer,
        "end": round(t.end / end * _END),
        "steps": [number for step in t.steps for number in (*step[:6], *_times(step[6:], end))],
        "waits": [number for bar in _waits(t, end) for number in bar],
    }


def _times(times: tuple[float, ...], end: float) -> Iterator[int]:
    """The first time, and how much later each of the others is than the one before."""
    before = 0
    for time in times:
        now = round(time / end * _END)
        yield now - before
        before = now


def _waits(t: Timeline, end: float) -> Iterator[tuple[int, int, int, int]]:
    """(step, track, begin, end) of the bars that wait, if they are long enough to be seen on any screen."""
    for bar in t.bars:
        begin, stop = round(bar.begin / end * _END), round(bar.end / end * _END)
        if bar.kind == "wait" and begin < stop:
            yield bar.step, bar.track, begin, stop
