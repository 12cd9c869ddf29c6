"""Interprets entries of PyTorch's flight recorder: which collectives a rank waits in, and how long it has worked.

The functions have no side effects. An entry is a dictionary as `upstream.collectives.entries` returns it; only its
known fields are read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..upstream.group_names import OWN

Entry = Mapping[str, Any]

POINTS = 16
"""The largest number of collectives of a step whose times are sent."""

_PEER = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
_TEXT = 60


@dataclass(frozen=True)
class Step:
    """The collectives of one step of one rank, with times in milliseconds.

    Attributes:
        step: the number of the step.
        shape: a digest that is equal on ranks that enter the same collectives.
        own: times from the end of the step before to the entry into each of at most `POINTS` collectives; empty if
            there are durations.
        total: the duration of the step.
        kernels: (group, number, duration) of at most `POINTS` collectives that have durations.
    """

    step: int
    shape: str
    own: tuple[float, ...]
    total: float
    kernels: tuple[tuple[str, int, float], ...] = ()


def is_done(entry: Entry) -> bool:
    """Whether the collective of an entry has completed; for gloo, only ``retired`` says so."""
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def group_of(entry: Entry) -> str:
    """The name of the process group in an entry of the flight recorder; "" if there is none."""
    group = entry.get("process_group") or [""]
    return str(group[0])


def operation(entry: Entry) -> str:
    """The name of an entry's operation without the name of the library: ``all_reduce``."""
    return str(entry.get("profiling_name", "")).rpartition(":")[2][:_TEXT]


def operands(entry: Entry) -> str:
    """The dtypes and sizes of an entry's inputs as text: ``Float[4160]``."""
    kinds, sizes = entry.get("input_dtypes") or [], entry.get("input_sizes") or []
    text = " ".join(f"{kind}{list(size)}" for kind, size in zip(kinds, sizes, strict=False))
    return text.replace(", ", ",")[:_TEXT]


def waits(entries: Sequence[Entry]) -> dict[str, list[Any]]:
    """The state of each process group, by its name.

    Returns:
        For each group, [the number of the last collective entered, the number up to which all collectives have
        completed, operation, operands]. The last two are those of the first open collective, or else of the last one.
    """
    found: dict[str, list[Any]] = {}
    for entry in entries:
        if entry.get("is_p2p"):
            continue
        number = int(entry.get("collective_seq_id", 0))
        state = found.setdefault(group_of(entry), [0, None, "", ""])
        state[0] = max(state[0], number)
        if state[1] is None:
            state[2:] = [operation(entry), operands(entry)]
            if not is_done(entry):
                state[1] = number - 1
    for state in found.values():
        state[1] = state[0] if state[1] is None else state[1]
    return found


def pairs(entries: Iterable[Entry]) -> list[list[Any]]:
    """The open sends and receives, at most eight: [group, "send" or "recv", index of the other rank in the group]."""
    found = []
    for entry in entries:
        if entry.get("is_p2p") and not is_done(entry):
            match = _PEER.search(str(entry.get("profiling_name", "")))
            if match:
                found.append([group_of(entry), match[1], int(match[3])])
    return found[:8]


def step(number: int, begin: int, end: int, entries: Iterable[Entry]) -> Step | None:
    """The collectives of a step, found by their times in nanoseconds; None if the duration of one is not known yet.

    Args:
        number: the number of the step.
        begin: when the last backward of the step before ended.
        end: when the last backward of this step ended.
        entries: entries of the flight recorder.
    """
    inside = [
        entry
        for entry in entries
        if begin < int(entry.get("time_created_ns", 0)) <= end and not entry.get("is_p2p") and group_of(entry) != OWN
    ]
    if any(str(e.get("profiling_name", "")).startswith("nccl:") and not is_done(e) for e in inside):
        return None
    timed = any("duration_ms" in e for e in inside)
    parts = [f"{operation(e)} {operands(e)}" for e in inside]
    shape = hashlib.blake2b("\n".join(parts).encode(), digest_size=4).hexdigest()
    chosen = inside
    if len(inside) > POINTS:
        chosen = [inside[place * (len(inside) - 1) // (POINTS - 1)] for place in range(POINTS)]
    own = () if timed else tuple(round((int(e["time_created_ns"]) - begin) / 1e6, 2) for e in chosen)
    kernels = tuple(
        (group_of(e), int(e.get("collective_seq_id", 0)), round(float(e["duration_ms"]), 3))
        for e in chosen
        if "duration_ms" in e
    )
    return Step(number, shape, own, round((end - begin) / 1e6, 2), kernels)


def sampled(steps: Sequence[Step], most: int) -> list[Step]:
    """At most `most` of the steps: those whose numbers a power of two divides, so that all ranks choose alike."""
    every = 1
    while sum(each.step % every == 0 for each in steps) > most:
        every *= 2
    return [each for each in steps if each.step % every == 0]
