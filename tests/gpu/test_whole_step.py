"""Training steps have the same bits in every process, whatever is timed there."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from ..support.distribution import ROOT
from ..support.processes import run_together

pytestmark = pytest.mark.gpu

PROCESSES: Mapping[str, tuple[str, ...]] = {
    "plain": ("deterministic", ""),
    "inverse": ("deterministic", "inverse"),
    "random": ("deterministic", "random"),
    "thread": ("deterministic", "inverse", "thread"),
    "control": ("default", ""),
    "inverse control": ("default", "inverse"),
}


def test_three_steps(tmp_path: Path) -> None:
    """Each process has caches of its own."""
    commands = {}
    for name, arguments in PROCESSES.items():
        caches = [f"{of}_CACHE_DIR={tmp_path / name / of}" for of in ("TORCHINDUCTOR", "TRITON")]
        program = ["-m", "tests.support.whole_step", *arguments]
        commands[name] = [
            "env",
            f"PYTHONPATH={ROOT}",
            "CUBLAS_WORKSPACE_CONFIG=:4096:8",
            *caches,
            sys.executable,
            *program,
        ]
    printed = run_together(commands, seconds=300, folder=tmp_path)
    found = {name: json.loads(text.splitlines()[-1]) for name, text in printed.items()}
    assert found["plain"] == found["inverse"] == found["random"] == found["thread"]
    assert found["control"] != found["inverse control"]
