"""Cross products of tests are cut: some cases of each run every time, and all of them run within several slices.

``--cases few`` runs, of a test function whose cases take long, as many cases as fit into `BUDGET` seconds, and none
of a function of which one case takes longer than `LONG`.
``--cases 3/10`` runs these and the third tenth of all others, so that ten runs with 0/10 to 9/10 run everything.
``--cases all``, the default, runs everything.

`tests/durations.json` says how long functions take; ``python tools/durations.py`` writes it.  A function that it does
not name is short or new, and runs whole.  Cases with the marker `full` run in their slices only.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import pytest

from .distribution import ROOT

DURATIONS = ROOT / "tests" / "durations.json"
BUDGET = 1.0
"""Seconds for the cases of one function that run every time; at least one case does, unless it takes `LONG`."""
LONG = 2.0
"""A case that takes longer than this (seconds) runs in its slice only."""


@dataclass(frozen=True)
class Cases:
    """What `--cases` asks for.

    Attributes:
        slice: the number of the slice that runs beside the few cases, None for no slice.
        slices: how many slices there are; 1 slice is everything.
    """

    slice: int | None
    slices: int = 1

    @classmethod
    def parse(cls, text: str) -> Cases:
        """Read the value of the option.

        Raises:
            pytest.UsageError: it is none of ``all``, ``few`` and ``K/N`` with 0 <= K < N.
        """
        if text == "all":
            return cls(0)
        if text == "few":
            return cls(None)
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if match is None or not int(match[1]) < int(match[2]):
            raise pytest.UsageError(f"--cases={text!r} is not allowed: expected all, few, or K/N with 0 <= K < N")
        return cls(int(match[1]), int(match[2]))

    def chosen(self, names: Sequence[str], seconds: Mapping[str, float], full: Set[str] = frozenset()) -> set[str]:
        """The tests that run, of those with these node ids.

        Args:
            names: node ids.
            seconds: how long a case of a function takes, by the function's node id.
            full: the node ids of those that run in their slices only.
        """
        of_function: dict[str, list[str]] = defaultdict(list)
        for name in (name for name in names if name not in full):
            of_function[function(name)].append(name)
        found = {case for case in names if self._has(case)}
        for name, cases in of_function.items():
            found.update(sorted(cases, key=_mixed)[: _few(seconds[name])] if name in seconds else cases)
        return found

    def _has(self, case: str) -> bool:
        return self.slice is not None and _mixed(case) % self.slices == self.slice


def function(node_id: str) -> str:
    """The node id of a test without its parameters."""
    return node_id.split("[")[0]


def durations() -> dict[str, float]:
    """Seconds of one case on average, by the node id of its function."""
    found = json.loads(DURATIONS.read_text(encoding="utf-8"))
    return {name: entry["seconds"] / entry["cases"] for name, entry in found.items()}


def _few(seconds: float) -> int:
    """How many cases run every time, of those that take this long."""
    return 0 if seconds > LONG else max(1, math.floor(BUDGET / seconds))


def _mixed(name: str) -> int:
    return zlib.crc32(name.encode())
