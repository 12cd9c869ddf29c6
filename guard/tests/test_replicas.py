"""A bit flipped in one gradient of one rank: rank, step and tensor are named, by the run itself and by a comparison."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dash_guard.recordings.compare import Comparison, compare
from tests.support.distribution import ROOT
from tests.support.processes import HANGS

from .support.divergent import FAULTS, RANK, STEP, STEPS, TENSOR

RANKS = 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]], str]:
    """The folder of all recordings, what each rank raised, and the log."""
    folder = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-m", "guard.tests.support.divergent", "cpu", str(RANKS), str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=HANGS)
    assert result.returncode == 0, result.stderr
    return folder, [json.loads(line) for line in result.stdout.splitlines()], result.stderr


def against_clean(runs: tuple[Path, list[dict[str, str]], str], fault: str) -> Comparison:
    assert fault in FAULTS
    return compare(runs[0] / "none", runs[0] / fault)


def test_runs_without_a_fault_are_equal(runs: tuple[Path, list[dict[str, str]], str]) -> None:
    result = against_clean(runs, "again")
    assert (result.verdict, result.steps, result.ranks) == ("equal", STEPS, RANKS)
    assert not result.findings


@pytest.mark.parametrize("fault", ["full", "fails"])
def test_a_recorder_that_fails_on_one_rank_ends_no_training(
    runs: tuple[Path, list[dict[str, str]], str], fault: str
) -> None:
    """The others go on with their recordings, and with comparing replicas, in which this rank takes part without."""
    result = against_clean(runs, fault)
    assert (result.verdict, result.first, result.findings) == ("not comparable", None, [])
    assert any(reason.startswith(f"b was cut off: rank {RANK} ") for reason in result.reasons)
    assert not any("rank 0" in reason or "rank 2" in reason for reason in result.reasons)
    words = {"full": "File too large", "fails": "no memory"}[fault]
    assert runs[2].count(words) == 1


def test_a_fault_before_the_reduction_is_found_by_a_comparison(runs: tuple[Path, list[dict[str, str]], str]) -> None:
    """All ranks then have the same wrong gradient, so that they agree with each other."""
    result = against_clean(runs, "before")
    assert str(result.first) == f"step {STEP}, rank {RANK}: local gradient {TENSOR}"
    assert result.conclusion.startswith(f"Before gradients are exchanged, only rank {RANK} differs.")
    assert {other.rank for other in result.others if other.phase == "gradient"} == set(range(RANKS))
    assert not result.findings


@pytest.mark.parametrize("fault", ["after", "raised"])
def test_a_fault_after_the_reduction_is_found_by_the_run(
    runs: tuple[Path, list[dict[str, str]], str], fault: str
) -> None:
    result = against_clean(runs, fault)
    assert str(result.first) == f"step {STEP}, rank {RANK}: gradient {TENSOR}"
    assert "every rank's gradient of this tensor is equal in both runs" in result.conclusion
    run, finding = result.findings[0]
    assert (run, finding["step"], finding["phase"], finding["tensor"]) == ("b", STEP, "gradient", TENSOR)
    assert (finding["minority"], finding["groups"]) == ([RANK], [[0, 2], [RANK]])


def test_all_ranks_raise_or_one_warns(runs: tuple[Path, list[dict[str, str]], str]) -> None:
    _, raised, log = runs
    text = f"step {STEP}: rank {RANK} differs from ranks 0, 2 in gradient {TENSOR} (and 1 more tensor)"
    assert raised == [{"raised": f"ReplicasDiffer: {text}"}] * RANKS
    assert log.count(text) == 1
