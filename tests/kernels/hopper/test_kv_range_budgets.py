"""The budgets of the Hopper kernels under intervals and dilations, in both directions, compiled without a GPU."""

from __future__ import annotations

import pytest

from dash_inductor.kernels.hopper.backward import build as backward
from dash_inductor.kernels.hopper.forward import build as forward
from dash_inductor.model.traits import Traits

from ...support.hopper_builds import TILES
from ...support.sass import compile_with_report
from .backward.test_budgets import SHARED_BYTES

STARTS = Traits(has_lo=True, components=("interval",))
COMPARED = Traits(components=("interval",), numbers=True)
BOTH = Traits(has_lo=True, components=("interval", "segments"))
DILATED = Traits(has_lo=True, components=("dilated",))
BY_HEAD = Traits(has_lo=True, components=("head_interval",))
THREE = Traits(components=("segments", "interval", "dilated"))
CASES = [((64, 64), BOTH), ((128, 128), STARTS), ((192, 128), COMPARED), ((192, 128), BOTH), ((256, 256), STARTS)]
CASES += [((64, 64), BY_HEAD), ((128, 128), BY_HEAD), ((256, 256), BY_HEAD)]
CASES += [((64, 64), DILATED), ((128, 128), DILATED), ((192, 128), DILATED), ((192, 128), THREE)]
SPILLED = {((192, 128), THREE): 520}
"""Bytes per thread, 420 in other cases."""


@pytest.mark.parametrize(("dims", "traits"), CASES, ids=str)
def test_the_backward_fits(dims: tuple[int, int], traits: Traits) -> None:
    of = backward.Specialisation("bfloat16", *dims, 1, "spt", traits, False, TILES[dims])
    compiled, report = compile_with_report(lambda: backward.Kernels(of).main)
    assert compiled.metadata.shared <= SHARED_BYTES
    assert report.registers <= 168
    assert not report.serialised
    assert max(report.spill_stores, report.spill_loads) <= SPILLED.get((dims, traits), 420), report


def test_vectors_without_room_are_read_from_global_memory() -> None:
    """All vectors are in shared memory but for head dims of 192 and 128, where there is room for two."""
    for dims, tiles in TILES.items():
        of = backward.Specialisation("bfloat16", *dims, 1, "spt", THREE, False, tiles)
        shared = backward.Kernels(of)._mask.SHARED
        assert shared == (2 if backward.tile_dims(*dims) == (192, 128) else 6)


@pytest.mark.parametrize(("dims", "traits"), CASES, ids=str)
def test_the_forward_fits(dims: tuple[int, int], traits: Traits) -> None:
    of = forward.Specialisation("bfloat16", *dims, traits, True)
    compiled, report = compile_with_report(lambda: forward.Kernels(of).main)
    assert compiled.metadata.shared <= SHARED_BYTES
    assert report.registers <= 168
    assert not report.serialised
    assert max(report.spill_stores, report.spill_loads) <= SPILLED.get((dims, traits), 420), report
