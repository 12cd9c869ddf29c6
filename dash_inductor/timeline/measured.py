"""Reads timelines that were recorded on a GPU.

The file is one JSON object.  Times are in nanoseconds since the earliest start:

    {"unit": "ns", "meta": {...},
     "spans": [{"sm": 0, "work_id": 7, "head": 1, "kv": 3, "q": 5, "start": 0, "wait": 900, "added": 1000, "end":
     1150}]}

A CTA computes a tile pair from `start` to `wait`, waits for its semaphore until `added`, and adds until `end`.  Query
heads are counted over all batch elements.  Different warps record the times, so a time may precede the previous one by
the clock's resolution; it then counts as equal.

A file has at most 256 MiB and 2^20 spans; `records.profiles` writes no larger ones.  Query heads are below 2^20, tiles,
work ids and SMs below 2^31, and times below 2^63.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from ..untrusted import Refused, parse_json, printable, read_regular, shortened
from .model import MICROSECONDS, Step, Timeline

_FIELDS = ("sm", "work_id", "head", "kv", "q", "start", "wait", "added", "end")
_BELOW = dict.fromkeys(("sm", "work_id", "kv", "q"), 1 << 31) | {"head": 1 << 20}  # all others: 2^63
_BYTES, _SPANS = 256 << 20, 1 << 20
_VALUES = 20 * _SPANS  # per span: a comma and a colon for each of nine fields, a bracket, and a comma
_NOTED, _NOTE = ("gpu", "schedule"), 200  # maximum number of characters of each


def read(path: Path, heads: Sequence[str] = (), shape: Mapping[str, int] | None = None) -> Timeline:
    """Reads the timeline of a recorded run, in microseconds; its lanes are SMs, in the order of their first work ids.

    Args:
        path: the file.
        heads: the names of the query heads of all batch elements; by default numbers.
        shape: the sizes of the call to compare with ``meta["shape"]`` of the file, where they are present.

    Raises:
        ArgumentError: the file cannot be read, has another format, or belongs to a call of another shape.
    """
    allowed = 'a file of a recorded run: {"unit": "ns", "spans": [...], "meta": {...}}'
    try:
        found = parse_json(read_regular(path, _BYTES), _VALUES)
    except Refused as error:
        raise ArgumentError("measured", str(path), f"{allowed} ({error})") from error
    except OSError as error:
        raise ArgumentError("measured", str(path), f"{allowed} ({error.strerror})") from error
    except MemoryError as error:
        raise ArgumentError("measured", str(path), f"{allowed} that fits into memory") from error
    if not isinstance(found, dict) or found.get("unit") != "ns" or not isinstance(found.get("spans"), list):
        raise ArgumentError("measured", str(path), allowed)
    meta = found.get("meta", {})
    recorded = meta.get("shape", {}) if isinstance(meta, dict) else None
    if not isinstance(recorded, dict):
        raise ArgumentError("measured", str(path), allowed)
    for name in _NOTED:
        if not isinstance(meta.get(name, ""), str) or len(meta.get(name, "")) > _NOTE:
            raise ArgumentError(
                "measured", f"{path}: {name}={shortened(meta[name])}", f"a text of up to {_NOTE} letters"
            )
    if len(found["spans"]) > _SPANS:
        raise ArgumentError("measured", f"{path}: {len(found['spans'])} spans", f"{_SPANS} at most")
    for index, span in enumerate(found["spans"]):
        _check(path, index, span)
    for name, size in (shape or {}).items():
        if recorded.get(name, size) != size:
            raise ArgumentError(
                "measured", f"{path}: a run of {name}={shortened(recorded[name])}", f"one of {name}={size}"
            )
    return of_spans(found["spans"], heads, meta)


def _check(path: Path, index: int, span: object) -> None:
    what = f"{path}, span {index}: {shortened(span)}"
    if not isinstance(span, dict) or not all(type(span.get(name)) is int for name in _FIELDS):
        raise ArgumentError("measured", what, f"integers {', '.join(_FIELDS)}")
    if any(span[name] < 0 for name in _FIELDS) or span["end"] < span["start"]:
        raise ArgumentError("measured", what, "numbers >= 0, and start <= end")
    for name in _FIELDS:
        if span[name] >= _BELOW.get(name, 1 << 63):
            raise ArgumentError("measured", what, f"{name} below {_BELOW.get(name, 1 << 63)}")


def of_spans(
    spans: Sequence[dict[str, int]], heads: Sequence[str] = (), meta: Mapping[str, Any] | None = None
) -> Timeline:
    """Returns the timeline of a recorded run; ``meta["gpu"]`` and ``meta["schedule"]`` go into its note.

    Args:
        spans: the processing of one tile pair each, as in the file of a recorded run (see the module).
        heads: the names of the query heads of all batch elements; by default numbers.
        meta: facts about the recorded call, as in the file.
    """
    first = {span["sm"]: span["work_id"] for span in sorted(spans, key=lambda s: -s["work_id"])}
    lanes = {sm: lane for lane, sm in enumerate(sorted(first, key=lambda sm: first[sm]))}
    count = 1 + max((span["head"] for span in spans), default=-1)
    if heads and count > len(heads):
        raise ArgumentError("measured", f"a run of {count} heads", f"one of {len(heads)} heads, as the shape has them")
    ranks: dict[tuple[int, int], int] = {}
    steps = []
    for span in sorted(spans, key=lambda s: (s["added"], s["end"])):
        key = span["head"], span["q"]
        rank = ranks[key] = ranks.get(key, -1) + 1
        times = accumulate((span[name] / 1000 for name in ("start", "wait", "added", "end")), max)
        steps.append(Step(lanes[span["sm"]], span["work_id"], span["head"], span["kv"], span["q"], rank, *times))
    end = max((step.written for step in steps), default=0.0)
    names = tuple(heads) or tuple(f"head {h}" for h in range(count))
    recorded = len({span["head"] for span in spans})
    known = meta or {}
    notes = [printable(str(known.get(name, ""))) for name in _NOTED]
    notes += [f"{recorded} of {len(names)} heads" if recorded < len(names) else ""]
    sms, note = tuple(f"SM {sm}" for sm in lanes), ", ".join(filter(None, notes))
    return Timeline("measured", MICROSECONDS, sms, names, tuple(steps), end, True, True, note, "real run")
