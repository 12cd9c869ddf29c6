"""The kernel that makes a bias's gradient."""

from __future__ import annotations

from typing import Any

import pytest
import sympy

from dash_inductor.lowering.backward import fills_gpu

LENGTH = sympy.Symbol("s0", integer=True, positive=True)


@pytest.mark.parametrize(
    ("size", "enough"),
    [
        ((1, 16, 4096, 4096), True),
        ((1, 8, 512, 512), False),  # T5 with short sequences: 32 programs
        ((1, 32, 512, 512), True),
        ((1, 1, 4096, 4096), False),
        ((8, 1, 2048, 2048), True),
        ((1, 12, sympy.Integer(900), LENGTH), True),
        ((1, 8, LENGTH, LENGTH), True),
        ((1, 1, LENGTH, LENGTH), False),
    ],
)
def test_the_dq_kernel_makes_it_where_it_has_enough_programs(size: tuple[Any, ...], enough: bool) -> None:
    assert fills_gpu(size, 128) == enough
