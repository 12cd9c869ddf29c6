"""Reads what a guard has left in its folder, and shows it as text or JSON."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dash_inductor.untrusted import Refused, parse_json, printable, read_regular

from ..errors import RecordingError
from .coverage import Coverage
from .entries import Entry, entries
from .findings import VERSION, Finding, read

BLIND = (
    "a wrong value that enters before the first digest on one rank, and the same mistake on all ranks (a wrong "
    "learning rate, swapped batches): dash-guard compare, with a recording of a healthy run, finds these"
)
"""What no check of a single run can find."""

_FILE, _FILES, _VALUES = 4 << 20, 4096, 1 << 16


@dataclass(frozen=True)
class Report:
    """What a guard has found and checked in a run.

    Attributes:
        folder: the folder of the guard.
        findings: findings in the order in which they were made.
        coverage: the coverage of all ranks together, as `Coverage.to_dict` returns it.
        world: the number of ranks of the job, 0 if unknown.
        joined: the number of ranks that the monitor has seen.
    """

    folder: str
    findings: tuple[Finding, ...]
    coverage: dict[str, Any]
    world: int
    joined: int

    def to_dict(self) -> dict[str, Any]:
        """The report as dictionaries, lists, strings and numbers, for JSON."""
        return {
            "v": VERSION,
            "folder": self.folder,
            "findings": [asdict(finding) for finding in self.findings],
            "coverage": self.coverage,
            "world": self.world,
            "joined": self.joined,
            "never_seen": BLIND,
        }

    @property
    def exit_code(self) -> int:
        """The exit status: 1 if there is a suspect or a confirmed fault, otherwise 0."""
        return int(any(finding.severity != "note" for finding in self.findings))


def load(folder: Path) -> Report:
    """Read a report from an untrusted folder.

    Raises:
        RecordingError: the folder does not come from a guard, or a file in it is damaged.
    """
    if not folder.is_dir():
        raise RecordingError(folder, "no such folder", "a folder that a guard has written")
    findings = tuple(read(folder))
    paths = [folder / "coverage.json", *sorted(folder.glob("coverage-rank*.json"))[:_FILES]]
    coverage, world, joined = Coverage(), 0, 0
    present = [path for path in paths if os.path.lexists(path)]
    if not present and not findings:
        raise RecordingError(folder, "neither findings nor coverage", "a folder that a guard has written")
    for path in present:
        try:
            raw = _checked(parse_json(read_regular(path, _FILE), _VALUES))
            if "v" in raw:
                world, joined = _number(raw.get("world")), _number(raw.get("joined"))
                raw = raw["checks"]
        except (Refused, OSError) as error:
            raise RecordingError(path, str(error), "the coverage that a guard has written") from error
        coverage.add(raw)
    return Report(str(folder), findings, coverage.to_dict(), world, joined)


def _checked(raw: Any) -> dict[str, Any]:
    """Check the schema of a coverage, as a monitor or a rank writes it."""
    if not isinstance(raw, dict):
        raise Refused("this is no object")
    checks = raw.get("checks", raw) if "v" in raw else raw
    if not isinstance(checks, dict):
        raise Refused("checks are no object")
    clean: dict[str, Any] = {}
    for name, entry in checks.items():
        if not isinstance(entry, dict) or not set(entry) <= {"counts", "unseen"}:
            raise Refused("the entry of a check has neither counts nor unseen")
        clean[printable(name)[:64]] = {
            part: {printable(key)[:256]: _number(value) for key, value in _object(entry.get(part, {})).items()}
            for part in ("counts", "unseen")
        }
    return {**raw, "checks": clean} if "v" in raw else clean


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refused("an object is missing")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise Refused("a number is no whole number")
    return value


def headline(report: Report) -> str:
    """The number of entries of a report by severity, in one line."""
    counts: Counter[str] = Counter(entry.finding.severity for entry in entries(report.findings))
    if not counts:
        return "nothing was found"
    order = ("confirmed", "suspect", "note")
    return ", ".join(f"{counts[s]} {s}{'s' if counts[s] != 1 and s != 'confirmed' else ''}" for s in order if counts[s])


def text(report: Report) -> str:
    """The report of a guard as text for a terminal."""
    lines = [f"{report.folder}: {headline(report)}; {ranks_seen(report)}"]
    for entry in entries(report.findings):
        lines += ["", f"{entry.finding.severity}: {when(entry.finding)}{entry.finding.sentence}"]
        lines += [f"  {name}: {value}" for name, value in details(entry)]
    lines += ["", "What was checked"]
    for check, entry in report.coverage.items():
        counts = ", ".join(f"{number} {name}" for name, number in entry["counts"].items()) or "nothing"
        lines.append(f"  {check}: {counts}")
        lines += [f"    not: {why} ({times} times)" for why, times in entry["unseen"].items()]
    lines += ["", f"What no guard sees: {BLIND}."]
    return "\n".join(map(printable, lines))


def ranks_seen(report: Report) -> str:
    """How many ranks were watched, in words: "7 of 8 ranks were watched"."""
    if not report.world:
        return "no rank has joined"
    return f"{report.joined} of {report.world} ranks were watched"


def when(finding: Finding) -> str:
    """The step and the stage of a finding, as a prefix of its sentence; "" without a step."""
    stage = f", {finding.stage}" if finding.stage else ""
    return f"step {finding.step}{stage}: " if finding.step else ""


def details(entry: Entry) -> list[tuple[str, str]]:
    """The other fields of an entry's finding that are not empty, and its earlier findings, as (name, text)."""
    finding = entry.finding
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(finding.time)) if 0 < finding.time < 1 << 40 else ""
    late = f"{finding.latency_s:.1f} s after it began" if finding.latency_s is not None else ""
    found = [
        ("what to do", finding.advice),
        ("where", ", ".join(dict.fromkeys(filter(None, (*finding.hosts, *finding.gpus))))),
        ("tensor", finding.tensor),
        ("operator", finding.operator),
        ("collective", finding.collective),
        ("cause", finding.cause if finding.cause != "unknown" else ""),
        ("reported", ", ".join(filter(None, (at, late)))),
        ("before", "; ".join(f"{each.severity}, {each.sentence}" for each in entry.before)),
    ]
    return [(name, value) for name, value in found if value]
