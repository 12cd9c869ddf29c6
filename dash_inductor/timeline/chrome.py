"""Converts a picture to Chrome's trace event format, for Perfetto and chrome://tracing.

A schedule is a process, and a lane is a thread; if additions overlap the computation of the next tile pair, the writer
that adds is a thread below its lane.  Times are microseconds; for a timeline in other units, one unit is shown as one
microsecond, and the name of the process says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .model import MICROSECONDS, Picture, Timeline
from .style import summary


def chrome(picture: Picture) -> dict[str, Any]:
    """Returns a picture as a trace event object, for `json.dumps`."""
    events = [e for process, t in enumerate(picture.timelines, start=1) for e in _events(process, t)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {"title": picture.title, "subtitle": picture.subtitle},
    }


def _events(process: int, t: Timeline) -> Iterator[dict[str, Any]]:
    unit = "" if t.unit == MICROSECONDS else f"; one unit is shown as 1 µs ({t.unit.axis})"
    name = ", ".join(filter(None, (t.name, "measured" if t.measured else "simulated", t.badge)))
    yield _name(process, 0, "process_name", f"{name}: {summary(t)}{unit}")
    yield {"ph": "M", "pid": process, "tid": 0, "name": "process_sort_index", "args": {"sort_index": process}}
    tracks = 2 if t.writer else 1
    for lane, name in enumerate(t.lanes):
        for track in range(tracks):
            yield _name(process, lane * tracks + track, "thread_name", f"{name}, writer" if track else name)
    for bar in t.bars:
        step = t.steps[bar.step]
        yield {
            "ph": "X",
            "pid": process,
            "tid": step.lane * tracks + bar.track,
            "name": f"{bar.kind} kv {step.kv} q {step.q}",
            "cat": bar.kind,
            "ts": round(bar.begin, 4),
            "dur": round(bar.end - bar.begin, 4),
            "args": {"head": t.heads[step.head], "rank": step.rank, "work_id": step.work_id},
        }


def _name(process: int, thread: int, event: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": event, "args": {"name": name}}
