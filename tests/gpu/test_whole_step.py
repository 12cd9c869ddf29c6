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
from ..support.step_differences import described

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


Found = dict[str, dict[str, str]]
"""Digests of values, of each program."""


def caches_of(name: str, folder: Path) -> Path:
    """The folder of a program's caches, its own or that of the name behind ":"."""
    return folder / name.rpartition(":")[2]


def run(programs: Mapping[str, Sequence[str]], folder: Path, seconds: float = 300) -> Found:
    """What programs print, by name."""
    commands = {}
    for name, arguments in programs.items():
        own = caches_of(name, folder)
        caches = [f"{of}_CACHE_DIR={own / of}" for of in ("TORCHINDUCTOR", "TRITON")]
        fixed = [f"PYTHONPATH={ROOT}", "CUBLAS_WORKSPACE_CONFIG=:4096:8", "TORCHINDUCTOR_COMPILE_THREADS=1"]
        commands[name] = ["env", *fixed, *caches, sys.executable, "-m", "tests.support.whole_step", *arguments]
    printed = run_together(commands, seconds=seconds, folder=folder)
    return {name: json.loads(text.splitlines()[-1]) for name, text in printed.items()}


def differences(found: Found, names: Sequence[str], folder: Path) -> str:
    """In which values and kernels programs differ, "" if they do not."""
    return described({name: found[name] for name in names}, {name: caches_of(name, folder) for name in names})


def test_three_steps(tmp_path: Path) -> None:
    """Another thread and another process's caches change no bit.  What changes the graph may have bits of its own."""
    programs: dict[str, list[str]] = {
        f"{how} {distorted}": [f"--distort={DISTORTED[distorted]}", *(["--how", how] if how else [])]
        for how, all_distorted in HOW.items()
        for distorted in all_distorted
    }
    programs |= {"control": ["--default"], "inverse control": ["--default", "--distort=inverse"]}
    found = run(programs, tmp_path)
    found |= run({"warm: plain": ["--distort=inverse"]}, tmp_path)
    assert differences(found, ["control", "inverse control"], tmp_path)
    sets = [
        [f"{'' if how == 'thread' else how} plain", *(f"{how} {distorted}" for distorted in all_distorted)]
        for how, all_distorted in HOW.items()
    ]
    found_different = [differences(found, names, tmp_path) for names in [*sets, [" plain", "warm: plain"]]]
    assert not any(found_different), "\n".join(filter(None, found_different))


def test_models(tmp_path: Path) -> None:
    """Three steps of each model, in three processes with fresh caches."""
    programs = {
        f"{model} {name}": [f"--distort={distorted}", f"--model={model}"]
        for model in MODELS
        for name, distorted in DISTORTED.items()
    }
    names = [*programs]
    found: Found = {}
    for first in range(0, len(names), TOGETHER):
        found |= run({name: programs[name] for name in names[first : first + TOGETHER]}, tmp_path)
    different = [differences(found, [f"{model} {name}" for name in DISTORTED], tmp_path) for model in MODELS]
    assert not any(different), "\n".join(filter(None, different))
