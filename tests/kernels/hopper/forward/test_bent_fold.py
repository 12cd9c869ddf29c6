"""The Hopper kernel with the bent fold, compiled without a GPU: longer expressions, the same bounds."""

from __future__ import annotations

import pytest

from dash_inductor.model import Band

from ....support.hopper_builds import Case, built
from ..backward.test_budgets import ORDER, order, spill_bounds

DIMS = (64, 64), (128, 128), (192, 128), (256, 256)


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_fits(dims: tuple[int, int]) -> None:
    case = Case(dims, Band(0), "bent_fold")
    used = built(case)
    assert not used.report.serialised
    spilled, in_loop = spill_bounds(case)
    assert max(used.report.spill_stores, used.report.spill_loads) <= spilled, str(used)
    assert used.loops.spills <= in_loop, str(used)
    assert order(used.ptx) == ORDER
