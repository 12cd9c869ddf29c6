"""Timelines that were recorded on a GPU.

The file is one JSON object.  Times are in nanoseconds since the first start:

    {"unit": "ns", "meta": {...},
     "spans": [{"sm": 0, "ticket": 7, "head": 1, "kv": 3, "q": 5, "start": 0, "wait": 900, "added": 1000, "end": 1150}]}

A CTA computes a tile pair from `start` to `wait`, waits for its turn until `added`, and adds until `end`.  Query heads
are counted through all batch elements.  Different warps write the times down, so one may precede the one before it by
the clock's resolution; it then counts as equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from .model import MICROSECONDS, Step, Timeline

_FIELDS = ("sm", "ticket", "head", "kv", "q", "start", "wait", "added", "end")


def read(path: Path, heads: Sequence[str] = (), shape: Mapping[str, int] | None = None) -> Timeline:
    """The timeline of a recorded run, in microseconds; its lanes are SMs, in the order of their first tickets.

    Args:
        heads: names of the query heads of all batch elements; by default numbers.
        shape: sizes of the call, by the names that they have in a file's ``meta["shape"]``, which may leave any out.

    Raises:
        ArgumentError: a file that cannot be read, is not one of these, or is of a call of another shape.
    """
    allowed = 'a file of a recorded run: {"unit": "ns", "spans": [...], "meta": {...}}'
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError("measured", str(path), f"{allowed} ({error})") from error
    if not isinstance(found, dict) or found.get("unit") != "ns" or not isinstance(found.get("spans"), list):
        raise ArgumentError("measured", str(path), allowed)
    meta = found.get("meta", {})
    recorded = meta.get("shape", {}) if isinstance(meta, dict) else None
    if not isinstance(recorded, dict):
        raise ArgumentError("measured", str(path), allowed)
    for index, span in enumerate(found["spans"]):
        _check(path, index, span)
    for name, size in (shape or {}).items():
        if recorded.get(name, size) != size:
            raise ArgumentError("measured", f"{path}: a run of {name}={recorded[name]}", f"one of {name}={size}")
    return of_spans(found["spans"], heads, meta)


def _check(path: Path, index: int, span: object) -> None:
    if not isinstance(span, dict) or not all(isinstance(span.get(name), int) for name in _FIELDS):
        raise ArgumentError("measured", f"{path}, span {index}: {span}", f"integers {', '.join(_FIELDS)}")
    if any(span[name] < 0 for name in _FIELDS) or span["end"] < span["start"]:
        raise ArgumentError("measured", f"{path}, span {index}: {span}", "numbers >= 0, and start <= end")


def of_spans(
    spans: Sequence[dict[str, int]], heads: Sequence[str] = (), meta: Mapping[str, Any] | None = None
) -> Timeline:
    """The timeline of the spans of a recorded run; ``meta["gpu"]`` and ``meta["schedule"]`` are noted."""
    first = {span["sm"]: span["ticket"] for span in sorted(spans, key=lambda s: -s["ticket"])}
    lanes = {sm: lane for lane, sm in enumerate(sorted(first, key=lambda sm: first[sm]))}
    count = 1 + max((span["head"] for span in spans), default=-1)
    if heads and count > len(heads):
        raise ArgumentError("measured", f"a run of {count} heads", f"one of {len(heads)} heads, as the shape has them")
    turns: dict[tuple[int, int], int] = {}
    steps = []
    for span in sorted(spans, key=lambda s: (s["added"], s["end"])):
        key = span["head"], span["q"]
        rank = turns[key] = turns.get(key, -1) + 1
        times = accumulate((span[name] / 1000 for name in ("start", "wait", "added", "end")), max)
        steps.append(Step(lanes[span["sm"]], span["ticket"], span["head"], span["kv"], span["q"], rank, *times))
    end = max((step.written for step in steps), default=0.0)
    names = tuple(heads) or tuple(f"head {h}" for h in range(count))
    recorded = len({span["head"] for span in spans})
    known = meta or {}
    notes = [str(known.get(name, "")) for name in ("gpu", "schedule")]
    notes += [f"{recorded} of {len(names)} heads" if recorded < len(names) else ""]
    sms, note = tuple(f"SM {sm}" for sm in lanes), ", ".join(filter(None, notes))
    return Timeline("measured", MICROSECONDS, sms, names, tuple(steps), end, True, True, note, "real run")
