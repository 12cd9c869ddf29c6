"""The budgets of the Hopper kernels under intervals, in both directions, compiled without a GPU."""

from __future__ import annotations

import pytest

from dash_inductor.kernels.hopper.backward import build as backward
from dash_inductor.kernels.hopper.forward import build as forward
from dash_inductor.model.traits import Traits

from ...support.hopper_builds import TILES
from ...support.sass import compile_with_report
from .backward.test_budgets import SHARED_BYTES

STARTS = Traits(has_lo=True, terms=("interval",))
COMPARED = Traits(terms=("interval",), numbers=True)
BOTH = Traits(has_lo=True, terms=("interval", "segments"))
CASES = [((64, 64), BOTH), ((128, 128), STARTS), ((192, 128), COMPARED), ((192, 128), BOTH), ((256, 256), STARTS)]
SPILLED = 420
"""Bytes per thread."""


@pytest.mark.parametrize(("dims", "traits"), CASES, ids=str)
def test_the_backward_fits(dims: tuple[int, int], traits: Traits) -> None:
    of = backward.Specialisation("bfloat16", *dims, 1, "spt", traits, False, TILES[dims])
    compiled, report = compile_with_report(lambda: backward.Kernels(of).main)
    assert compiled.metadata.shared <= SHARED_BYTES
    assert report.registers <= 168
    assert not report.serialised
    assert max(report.spill_stores, report.spill_loads) <= SPILLED, report


@pytest.mark.parametrize(("dims", "traits"), CASES, ids=str)
def test_the_forward_fits(dims: tuple[int, int], traits: Traits) -> None:
    of = forward.Specialisation("bfloat16", *dims, traits, True)
    compiled, report = compile_with_report(lambda: forward.Kernels(of).main)
    assert compiled.metadata.shared <= SHARED_BYTES
    assert report.registers <= 168
    assert not report.serialised
    assert max(report.spill_stores, report.spill_loads) <= SPILLED, report
