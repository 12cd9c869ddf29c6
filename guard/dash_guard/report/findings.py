"""Findings of the guard; each is one line of JSON in ``findings.jsonl``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from dash_inductor.errors import ArgumentError
from dash_inductor.untrusted import Refused, parse_json, printable, read_regular

from ..errors import RecordingError

VERSION = 1
"""The version of the schema of the lines."""

Kind = Literal[
    "bits", "at_rest", "cross_rank_recompute", "same_rank_recompute", "collective", "foreign", "data",
    "hang", "dead", "stopped", "slow", "link", "desync", "nondeterminism", "guard",
]  # fmt: skip
Severity = Literal["note", "suspect", "confirmed"]
SEVERITIES: dict[Severity, str] = {
    "confirmed": "two independent facts accuse a rank, or one that leaves no doubt",
    "suspect": "one fact accuses a rank",
    "note": "worth knowing",
}
"""The severities of findings, the worst first, and what they mean."""
Cause = Literal["machine", "network", "program", "unknown"]

LENGTH = 512
"""The largest number of characters of a name or a text."""
RANKS = 1 << 20
_FILE = 64 << 20  # bytes of findings that are read
_LINE = 1 << 16
_VALUES = 1 << 15


@dataclass(frozen=True)
class Finding:
    """One fact about a training run, or what several facts mean together.

    Attributes:
        kind: the check or detector that has found it; "guard": the guard itself, for example a damaged message.
        severity: one of `SEVERITIES`.
        sentence: the finding in one sentence for people, without the step and without a full stop at its end.
        advice: what to do now; "" if nothing.
        ranks: the accused ranks in ascending order; () if none is accused.
        step: the number of the training step, from 1; None if it belongs to no step.
        stage: the stage of a step, one of `observers.phases` or "at rest"; "" if it belongs to none.
        tensor: the name of the first tensor that differs; "" if unknown.
        operator: the operator that computed it, with its module and source line; "" if unknown.
        collective: operation, number and group of the collective; "" if there is none.
        groups: groups of ranks with equal bits, the largest group first.
        cause: what the fault comes from: "machine", "network", "program" or "unknown".
        evidence: numbers and short texts by name; no values of tensors.
        hosts, gpus: of the accused ranks, in the order of `ranks`.
        time: seconds since the epoch, by the monitor's clock.
        latency_s: seconds from the first event to the finding; None if unknown.
    """

    kind: Kind
    severity: Severity
    sentence: str
    advice: str = ""
    ranks: tuple[int, ...] = ()
    step: int | None = None
    stage: str = ""
    tensor: str = ""
    operator: str = ""
    collective: str = ""
    groups: tuple[tuple[int, ...], ...] = ()
    cause: Cause = "unknown"
    evidence: Mapping[str, Any] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    time: float = 0.0
    latency_s: float | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("kind", get_args(Kind)), ("severity", get_args(Severity)), ("cause", get_args(Cause))):
            if getattr(self, name) not in allowed:
                raise ArgumentError(name, getattr(self, name), allowed)

    def to_json(self) -> str:
        """The finding as one line of JSON, without a line feed."""
        return json.dumps({"v": VERSION, **asdict(self)}, separators=(",", ":"), allow_nan=False)


def from_json(line: bytes) -> Finding:
    """Parse a finding from an untrusted line.

    Raises:
        Refused: the line is no finding of this version, or larger than allowed.
    """
    if len(line) > _LINE:
        raise Refused(f"a line of {len(line)} bytes, where {_LINE} are allowed")
    raw = parse_json(line, _VALUES)
    names = {f.name for f in fields(Finding)}
    if not isinstance(raw, dict) or raw.pop("v", None) != VERSION or not set(raw) <= names:
        raise Refused(f"a line that is no finding of version {VERSION}")
    for name in ("sentence", "advice", "stage", "tensor", "operator", "collective"):
        text = raw.get(name, "")
        if not isinstance(text, str) or len(text) > 4 * LENGTH:
            raise Refused(f"{name} is no text of at most {4 * LENGTH} characters")
        raw[name] = printable(text)
    raw["ranks"] = _ranks(raw.get("ranks", []))
    raw["groups"] = tuple(_ranks(group) for group in _list(raw.get("groups", [])))
    for name in ("hosts", "gpus"):
        raw[name] = tuple(printable(str(text)[:LENGTH]) for text in _list(raw.get(name, [])))
    for name, kinds in (("step", (int, type(None))), ("latency_s", (int, float, type(None))), ("time", (int, float))):
        if not isinstance(raw.get(name, 0), kinds) or isinstance(raw.get(name), bool):
            raise Refused(f"{name} is no number")
    if not isinstance(raw.get("evidence", {}), dict):
        raise Refused("evidence is no object")
    try:
        return Finding(**raw)
    except (ArgumentError, TypeError) as error:
        raise Refused(str(error)) from error


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise Refused("a list is missing")
    return value


def _ranks(value: Any) -> tuple[int, ...]:
    found = _list(value)
    if not all(type(rank) is int and 0 <= rank < RANKS for rank in found):
        raise Refused(f"ranks are whole numbers from 0 to {RANKS - 1}")
    return tuple(found)


class FindingsFile:
    """The file ``findings.jsonl`` in a folder, to which each finding is appended at once.

    Args:
        folder: the folder; it is created if needed.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "findings.jsonl"

    def add(self, finding: Finding) -> None:
        """Append a finding.

        Raises:
            OSError: the file cannot be written.
        """
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, finding.to_json().encode() + b"\n")
        finally:
            os.close(descriptor)


def read(folder: str | os.PathLike[str]) -> list[Finding]:
    """Read all findings from the ``findings.jsonl`` of a folder, in order; [] if there is no such file.

    Raises:
        RecordingError: the file cannot be read or is no file of findings.
    """
    path = Path(folder) / "findings.jsonl"
    if not path.exists():
        return []
    try:
        return [from_json(line) for line in read_regular(path, _FILE).split(b"\n") if line]
    except (Refused, OSError) as error:
        raise RecordingError(path, str(error), "findings that a guard has written") from error
