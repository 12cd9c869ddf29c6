"""The callbacks of training tools on two ranks of one job, with DDP over gloo."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..support.distribution import ROOT
from ..support.processes import HANGS
from ..support.trained_on_ranks import STEPS, TOOLS, WORLD

pytest.importorskip("dash_guard", reason="the ranks are recorded and watched")

import dash_guard
from dash_guard.report.findings import read


@pytest.mark.parametrize("names", [("a",), pytest.param(("a", "b"), marks=pytest.mark.full)], ids="".join)
@pytest.mark.parametrize("tool", TOOLS)
def test_two_ranks(tool: str, names: tuple[str, ...], tmp_path: Path) -> None:
    """Both train with the settings, are recorded and watched, and have equal weights; only the first says anything."""
    if importlib.util.find_spec(tool) is None:  # not imported: Lightning sets variables of the process
        pytest.skip(f"{tool} is not installed")
    command = [sys.executable, "-m", "tests.support.trained_on_ranks", tool, str(tmp_path), *names]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANGS, check=False
    )
    assert found.returncode == 0, found.stderr
    seen = [[json.loads((tmp_path / f"{name}{rank}.json").read_text()) for rank in range(WORLD)] for name in names]
    assert len({rank["weights"] for run in seen for rank in run}) == 1
    for name, (first, other) in zip(names, seen, strict=True):
        assert [text for text in first["messages"] if "replaced" in text] == first["messages"][-1:]
        assert other["messages"] == []
        assert first["flags"] == [True] * STEPS + [False]
        assert other["flags"] == [True] * STEPS + [tool == "accelerate"]  # which ends no tracker of this rank
        compared = dash_guard.compare(tmp_path / "a", tmp_path / name)
        assert (compared.verdict, compared.steps, compared.ranks) == ("equal", STEPS, WORLD), compared
        findings = read(tmp_path / f"guard {name}")
        assert {finding.severity for finding in findings} <= {"note"}, findings
