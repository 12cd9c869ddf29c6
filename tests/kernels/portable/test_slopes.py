"""The portable kernels with ALiBi slopes in Triton's interpreter, where queries and keys differ in number."""

from __future__ import annotations

import pytest

from ...support.forks import interpreted_results

CASES = ["causal:bottom_right;40;66;1;two_pass", "full;66;40;2;spt"]
MORE = ["band(0,9):bottom_right;40;66;2;spt", "band(-5,7):bottom_right;66;40;1;two_pass"]


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.full)], ids=["", "more"])
def test_against_fp64(cases: list[str]) -> None:
    found = interpreted_results("slopes", *cases)
    assert len(found) == len(cases)
    for case, line in zip(cases, found, strict=True):
        errors = [float(word) for word in line.removeprefix(case).split()]
        assert len(errors) == 4
        assert max(errors) < 5e-5, line
