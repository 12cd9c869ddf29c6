"""Processes that train together have the same bits in every run, whatever is in their caches."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest

from ..support.distribution import ROOT
from ..support.processes import HANGS, run_together

RANKS = 2


def train(how: str, caches: Path, folder: Path) -> list[dict[str, str]]:
    """The digests of three steps by name, of each process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    commands = {}
    for rank in range(RANKS):
        fixed = {"PYTHONPATH": ROOT, "RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 1}
        fixed |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHINDUCTOR_COMPILE_THREADS": 1}
        fixed["TORCHINDUCTOR_CACHE_DIR"] = caches / str(rank)
        program = [sys.executable, "-m", "tests.support.whole_step", "--device=cpu", "--how", how]
        commands[str(rank)] = ["env", *(f"{name}={value}" for name, value in fixed.items()), *program]
    printed = run_together(commands, seconds=HANGS, folder=folder)
    return [json.loads(printed[str(rank)].splitlines()[-1]) for rank in range(RANKS)]


@pytest.mark.full
@pytest.mark.skipif(os.name != "posix", reason="gloo between processes")
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_three_steps(how: str, tmp_path: Path) -> None:
    first = train(how, tmp_path / "first", tmp_path)
    one, other = ({name: of[name] for name in of if not name.startswith("step")} for of in first)
    assert one == other != {}  # parameters
    assert train(how, tmp_path / "second", tmp_path) == first
    assert train(how, tmp_path / "second", tmp_path) == first  # from caches
