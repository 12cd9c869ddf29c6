"""The demo on a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ..support.distribution import ROOT


@pytest.mark.gpu
def test_whole_demo() -> None:
    command = [sys.executable, "-m", "examples.demo", "--size", "gpu"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert torch.cuda.get_device_name() in ended.stdout
    assert "Every attention was replaced." in ended.stdout
