"""What the guard has found: one finding is one line of JSON in ``findings.jsonl``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from dash_inductor.errors import ArgumentError, RecordingError
from dash_inductor.untrusted import Refused, parse_json, printable, read_regular

VERSION = 1
"""Of the lines' schema."""

Kind = Literal[
    "bits", "rest", "roll_call", "replay", "door", "foreign", "data",
    "hang", "dead", "stopped", "slow", "link", "desync", "nondeterminism", "guard",
]  # fmt: skip
Severity = Literal["note", "suspect", "verdict"]
Cause = Literal["machine", "wire", "program", "unknown"]

LENGTH = 512
"""Characters of a name or a text at most."""
RANKS = 1 << 20
_FILE = 64 << 20  # bytes of findings that are read
_LINE = 1 << 16
_VALUES = 1 << 15


@dataclass(frozen=True)
class Finding:
    """One fact about a training run, or what several facts mean together.

    Attributes:
        kind: which check has found it; "guard": the guard itself, for example a damaged message.
        severity: "note": worth knowing; "suspect": one fact accuses; "verdict": two independent facts do.
        sentence: all of it but the step in one sentence for people, without a full stop at its end.
        advice: what to do now, "" if nothing.
        ranks: who is accused, in order; () for nobody.
        step: of training, from 1; None for what belongs to no step.
        stage: of a step, one of `observers.phases`, or "rest", "".
        tensor: the first tensor that differs, "" if unknown.
        operator: module, operator and source line that computed it, "" if unknown.
        collective: group, number and operation, "" if it is about none.
        groups: ranks with equal bits, the largest group first.
        cause: what it is about.
        evidence: what speaks for it, by name: numbers and short texts; no values of tensors.
        hosts, gpus: of the accused ranks, in the order of `ranks`.
        time: seconds since the epoch, by the monitor's clock.
        latency_s: from the first event to the finding, in seconds, if known.
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
        """One line of JSON, without a line feed."""
        return json.dumps({"v": VERSION, **asdict(self)}, separators=(",", ":"), allow_nan=False)


def from_json(line: bytes) -> Finding:
    """The finding in a line that somebody else may have written.

    Raises:
        Refused: it is none of this version, or larger than allowed.
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
    """``findings.jsonl`` in a folder, to which lines are appended, each at once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "findings.jsonl"

    def add(self, finding: Finding) -> None:
        """Append a finding.

        Raises:
            OSError: it cannot be written.
        """
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, finding.to_json().encode() + b"\n")
        finally:
            os.close(descriptor)


def read(folder: str | os.PathLike[str]) -> list[Finding]:
    """All findings of a folder, in the order in which they were made; [] if nothing was found.

    Raises:
        RecordingError: the file is no file of findings.
    """
    path = Path(folder) / "findings.jsonl"
    if not path.exists():
        return []
    try:
        return [from_json(line) for line in read_regular(path, _FILE).split(b"\n") if line]
    except (Refused, OSError) as error:
        raise RecordingError(path, str(error), "findings that a guard has written") from error
