"""Some cases of every function run every time, and all slices together run everything."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from .support.slices import BUDGET, DURATIONS, LONG, Cases, durations, function

NAMES = [f"tests/a.py::{kind}[{n}]" for kind in ("long", "short", "longest") for n in range(50)] + ["b.py::once"]
SECONDS = {"tests/a.py::long": BUDGET / 5, "tests/a.py::longest": LONG + 1, "b.py::once": 2 * BUDGET}


def test_few() -> None:
    found = Cases.parse("few").chosen(NAMES, SECONDS)
    counts = Counter(function(name) for name in found)
    assert counts == {"tests/a.py::long": 5, "tests/a.py::short": 50, "b.py::once": 1}


def test_what_takes_minutes_runs_in_its_slice() -> None:
    full = {name for name in NAMES if "short" in name}
    assert Cases.parse("few").chosen(NAMES, SECONDS, full).isdisjoint(full)
    found = [Cases.parse(f"{number}/7").chosen(NAMES, SECONDS, full) & full for number in range(7)]
    assert set().union(*found) == full == Cases.parse("all").chosen(NAMES, SECONDS, full) & full
    assert sum(map(len, found)) == len(full)


@pytest.mark.parametrize("slices", [1, 3, 10])
def test_all_slices_are_everything(slices: int) -> None:
    few = Cases.parse("few").chosen(NAMES, SECONDS)
    found = [Cases.parse(f"{number}/{slices}").chosen(NAMES, SECONDS) for number in range(slices)]
    assert set().union(*found) == set(NAMES) == Cases.parse("all").chosen(NAMES, SECONDS)
    assert all(few <= names for names in found)
    assert max(map(len, found)) <= len(few) + 2 * len(NAMES) / slices


@pytest.mark.parametrize("text", ["some", "", "3", "3/3", "-1/3", "1/0", "a/b"])
def test_other_values(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="is not allowed"):
        Cases.parse(text)


def test_the_file_of_durations() -> None:
    """It is written by a tool, and names functions of tests that exist."""
    found = json.loads(DURATIONS.read_text(encoding="utf-8"))
    assert list(found) == sorted(found)
    assert all(function(name) == name and seconds > 0 for name, seconds in durations().items())
    missing = {name.split("::")[0] for name in found if not (DURATIONS.parents[1] / name.split("::")[0]).exists()}
    assert not missing
