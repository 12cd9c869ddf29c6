"""The portable kernels under masks of rows, in Triton's interpreter and through Inductor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Lengths out of order, of one token, of whole tiles and row blocks, empty documents; two passes and the ordered one.
CASES = [
    "two_pass,causal,2,float32,40+1+17",
    "two_pass:dynamic,band(-7;9),1,float16,64+0+129",
    "ascending,full,1,float32,20+5",
    "spt,causal,2,float32,128+33",
]


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    """Of all cases, from one process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.interpreted_placed", *CASES],
        cwd=Path(__file__).parent.parent, env=environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line.removeprefix("RESULT ") for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    return dict(zip(CASES, lines, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_documents(results: dict[str, str], case: str) -> None:
    """Values of attention; the bits of every document alone, among others, and among NaN."""
    assert results[case] == "exact"
