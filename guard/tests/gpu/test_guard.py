"""A watched job over NCCL: a slow and a hung rank are named, from the times that collectives have on the device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dash_guard.report.findings import read
from dash_guard.report.report import load
from tests.support.distribution import ROOT

from ..support.guarded import BAD

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def test_a_slow_and_a_hung_rank_are_named_over_nccl(tmp_path: Path) -> None:
    guard = tmp_path / "guard"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [*launcher, "-m", "guard.tests.support.guarded", str(tmp_path), "cuda", "clean", "slow", "hang"]
    command = [sys.executable, "-m", "dash_guard", "watch", "--folder", str(guard), "--", *program]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_NCCL_ENABLE_TIMING": "1"}
    job = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    findings = read(guard)
    print(*findings, load(guard).coverage, sep="\n")
    named = [(finding.kind, finding.ranks) for finding in findings]
    assert named == [("slow", (BAD,)), ("hang", (BAD,))], job.stdout[-4000:] + job.stderr[-4000:]
    assert job.returncode == 0  # suspects are not confirmed
    assert (tmp_path / "bits").exists()
    times = [finding.time - float((tmp_path / finding.kind).read_text().split()[0]) for finding in findings]
    assert max(times) < 10, times
    assert all(finding.gpus and finding.gpus[0] for finding in findings)


def test_inputs_are_hashed_on_the_device_without_waiting(tmp_path: Path) -> None:
    """Two ranks with the same data are named; the hashes are sent by the heartbeat thread."""
    guard = tmp_path / "guard"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [*launcher, "-m", "guard.tests.support.guarded", str(tmp_path), "cuda", "data"]
    command = [sys.executable, "-m", "dash_guard", "watch", "--folder", str(guard), "--", *program]
    job = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert [(finding.kind, finding.ranks) for finding in read(guard)] == [("data", (0, BAD))], job.stderr
    assert job.returncode == 0  # a suspect is not confirmed
