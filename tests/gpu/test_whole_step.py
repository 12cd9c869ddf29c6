"""Training steps have the same bits in every process, whatever is timed there."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from ..support.distribution import ROOT
from ..support.processes import run_together
from ..support.small_models import MODELS

pytestmark = pytest.mark.gpu

DISTORTED = {"plain": "", "inverse": "inverse", "random": "random"}
HOW: Mapping[str, tuple[str, ...]] = {
    "": ("plain", "inverse", "random"),
    "thread": ("inverse",),
    "checkpoint": ("plain", "inverse"),
    "scalars": ("plain", "inverse"),
    "dynamic": ("plain", "inverse"),
    "graphs": ("plain", "inverse"),
}
"""What else a program does, with how timings are distorted in its processes."""
TOGETHER = 18
"""Processes at the same time, which need 2 to 3 GB of memory each."""


def run(programs: Mapping[str, Sequence[str]], folder: Path, seconds: float = 300) -> dict[str, list[str]]:
    """What programs print, by name; each has caches of its own, or those of the name behind ":"."""
    commands = {}
    for name, arguments in programs.items():
        own = folder / name.rpartition(":")[2]
        caches = [f"{of}_CACHE_DIR={own / of}" for of in ("TORCHINDUCTOR", "TRITON")]
        fixed = [f"PYTHONPATH={ROOT}", "CUBLAS_WORKSPACE_CONFIG=:4096:8", "TORCHINDUCTOR_COMPILE_THREADS=1"]
        commands[name] = ["env", *fixed, *caches, sys.executable, "-m", "tests.support.whole_step", *arguments]
    printed = run_together(commands, seconds=seconds, folder=folder)
    return {name: json.loads(text.splitlines()[-1]) for name, text in printed.items()}


def test_three_steps(tmp_path: Path) -> None:
    """Another thread and another process's caches change no bit.  What changes the graph may have bits of its own."""
    programs: dict[str, list[str]] = {
        f"{how} {distorted}": [f"--distort={DISTORTED[distorted]}", *(["--how", how] if how else [])]
        for how, all_distorted in HOW.items()
        for distorted in all_distorted
    }
    programs |= {"control": ["--default"], "inverse control": ["--default", "--distort=inverse"]}
    found = run(programs, tmp_path)
    warm = run({"warm: plain": ["--distort=inverse"]}, tmp_path)["warm: plain"]
    assert found["control"] != found["inverse control"]
    for how, all_distorted in HOW.items():
        same = "" if how == "thread" else how
        first = found[f"{same} plain"]
        assert all(found[f"{how} {distorted}"] == first for distorted in all_distorted), how
    assert warm == found[" plain"]


def test_models(tmp_path: Path) -> None:
    """Three steps of each model, in three processes with fresh caches."""
    programs = {
        f"{model} {name}": [f"--distort={distorted}", f"--model={model}"]
        for model in MODELS
        for name, distorted in DISTORTED.items()
    }
    names, found = [*programs], {}
    for first in range(0, len(names), TOGETHER):
        found |= run({name: programs[name] for name in names[first : first + TOGETHER]}, tmp_path)
    differ = [model for model in MODELS if len({str(found[f"{model} {name}"]) for name in DISTORTED}) > 1]
    assert not differ
