"""The portable kernels under masks of rows, in Triton's interpreter and through Inductor."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ...support.distribution import ROOT
from ...support.processes import HANGS

FULL = pytest.mark.full
# Lengths out of order, of one token, of whole tiles and row blocks, empty documents; two passes and the ordered one.
CASES = [
    pytest.param("two_pass,causal,2,float32,40+1+17", marks=FULL),
    pytest.param("two_pass:dynamic,band(-7;9),1,float16,64+0+129", marks=FULL),
    "ascending,full,1,float32,20+5",
    pytest.param("spt,causal,2,float32,128+33", marks=FULL),
]


@pytest.mark.parametrize("case", CASES)
def test_documents(case: str) -> None:
    """Values of attention; the bits of every document alone, among others, and among NaN."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.interpreted_placed", case],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=HANGS, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert [line for line in result.stdout.splitlines() if line.startswith("RESULT ")] == ["RESULT exact"]
