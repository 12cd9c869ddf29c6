"""The portable kernels under masks of rows, in Triton's interpreter and through Inductor."""

from __future__ import annotations

import pytest

from ...support.forks import interpreted_results

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
    assert interpreted_results("varlen", case) == ["exact"]
