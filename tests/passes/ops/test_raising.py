"""What becomes of operators of PyTorch's list of those that raise under deterministic algorithms, on CUDA."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from ...support.distribution import ROOT
from ...support.fakecuda import compiler
from ...support.processes import HANGS
from .raising import BEFORE_2_13, NOT_TRACED, OUTCOMES, PROGRAMS, table


def test_the_list_of_pytorch_is_covered() -> None:
    """A version of PyTorch that lists another operator fails here."""
    text = torch.use_deterministic_algorithms.__doc__ or ""
    listed = text.split("operations will throw a\n")[1].split("In addition")[0]
    names = set(re.findall(r":(?:class|func):`([\w.]+)`", listed))
    assert len(names) > 15
    assert names <= PROGRAMS.keys() | NOT_TRACED
    assert OUTCOMES.keys() == PROGRAMS.keys()


def test_the_page_has_the_list() -> None:
    assert table() in (ROOT / "docs/whole-step.md").read_text(encoding="utf-8")


@pytest.mark.skipif(compiler() is None, reason="the fake CUDA device needs a C++ compiler")
def test_what_becomes_of_operators_that_raise() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.passes.ops.raising"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=HANGS, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    expected = OUTCOMES | (BEFORE_2_13 if torch.__version__ < (2, 13) else {})
    assert json.loads(result.stdout.splitlines()[-1]) == expected
