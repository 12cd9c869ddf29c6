"""Offsets from strides hold 64 bits: elements that lie far apart are read and written where they are.

``python -m tests.interpreted.far_strides KIND COUNT ...`` compares as many random cases as one likes.
"""

from __future__ import annotations

import pytest

from ..support.forks import interpreted_results

FEW = ["sums 4", "behind 2", "tables 3", "attention 1"]
MORE = ["sums 40", "behind 10", "tables 20", "attention 8"]


@pytest.mark.parametrize("case", [*FEW, *(pytest.param(case, marks=pytest.mark.full) for case in MORE)])
def test_bits_are_those_of_near_elements(case: str) -> None:
    assert interpreted_results("far_strides", *case.split()) == [case]
