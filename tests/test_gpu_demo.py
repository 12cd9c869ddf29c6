"""The demo on a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.gpu
def test_whole_demo() -> None:
    command = [sys.executable, "-m", "examples.demo", "--size", "gpu"]
    ended = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert torch.cuda.get_device_name() in ended.stdout
    assert "Every attention was replaced." in ended.stdout
