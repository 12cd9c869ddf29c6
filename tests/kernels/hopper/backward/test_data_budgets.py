"""The budget of the Hopper kernel under masks that are data, compiled without a GPU; its order is as under bands."""

from __future__ import annotations

import expecttest
import pytest

from dash_inductor.kernels.hopper.backward import build
from dash_inductor.model import Band

from ....support import kernel_code, sass
from ....support.cases import some
from ....support.hopper_builds import TILES, Case, built
from ....support.triton_version import PINNED
from .test_budgets import HALF, SHARED_BYTES, dependent_launches, is_ordered

FULL, CAUSAL, WINDOW = Band(), Band(0), Band(0, 1023)

# All pairs of head dims, with every band and both kinds of data spread over them.
SOON = [
    Case((64, 64), CAUSAL, "bent_fold", HALF, 4, segment_ids=True),
    Case((64, 64), WINDOW, "descending", dense=True),
    Case((128, 128), WINDOW, "spt", HALF, segment_ids=True),
    Case((128, 128), CAUSAL, "bent_fold", segment_ids=True, dense=True),
    Case((128, 128), FULL, "ascending", dense=True),
    Case((192, 128), CAUSAL, "spt", segment_ids=True),
    Case((192, 128), FULL, "ascending", HALF, dense=True),
    Case((256, 256), CAUSAL, "descending", segment_ids=True, dense=True),
]
# If all tests are run: segment ids alone, under full masks and with grouped heads too.
LATER = [
    Case((64, 64), FULL, "ascending", segment_ids=True),
    Case((128, 128), FULL, "ascending", segment_ids=True),
    Case((128, 128), CAUSAL, "bent_fold", group=4, segment_ids=True),
    Case((256, 256), CAUSAL, "spt", group=4, segment_ids=True),
]
cases = some([*SOON, *LATER], SOON)


@cases
def test_fits(case: Case) -> None:
    """Shared memory, registers, no matrix instruction made to wait; spills of scalars, never of tiles.

    The mask's reads cost nothing in steps without it, so the spills that all steps run are the spills of the tile
    schedule.  A producer, which has few registers, spills while it clears rows that take no part.
    """
    used = built(case)
    assert used.shared_memory <= SHARED_BYTES
    assert used.report.registers <= 168
    assert not used.report.serialised
    assert used.loops.count == 1
    spilled, in_loop = spill_bounds(case)
    assert max(used.report.spill_stores, used.report.spill_loads) <= spilled, str(used)
    assert used.loops.spills <= in_loop, str(used)
    assert used.loops.barriers == case.barriers, "Triton lets warps meet where it is not sure"


def spill_bounds(case: Case) -> tuple[int, int]:
    """Spilled bytes per thread, and spill instructions that every step runs."""
    return (200, 1) if case.dims == (256, 256) else (300, 18)


@PINNED
@cases
def test_code_is_that_of_the_golden_file(case: Case) -> None:
    """A change that should not touch this kernel does not; one that should rewrites the file, see `kernel_code`."""
    assert kernel_code.digest(built(case).ptx) == kernel_code.golden()[str(case)]


@cases
def test_adds_are_ordered(case: Case) -> None:
    assert is_ordered(built(case).ptx, case.group)
    assert dependent_launches(built(case).ptx) == ["wait", "launch_dependents"]


def test_every_variant_has_cases() -> None:
    assert (
        {build.tile_dims(*case.dims) for case in SOON}
        == set(build.BACKWARD_CONFIGS)
        == {build.tile_dims(*d) for d in TILES}
    )


@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (256, 256)], ids=str)
def test_prepare_and_finish(dims: tuple[int, int]) -> None:
    kernels = build.Kernels(Case(dims, CAUSAL, "spt", HALF, 4, segment_ids=True).specialisation())
    for compile in (lambda: kernels.prepare, lambda: kernels.finish):
        _, report = sass.compile_with_report(compile)
        assert max(report.spill_stores, report.spill_loads) <= 8
    assert dependent_launches(kernels.prepare.asm["ptx"]) == ["launch_dependents"]
    assert dependent_launches(kernels.finish.asm["ptx"]) == ["wait"]


@PINNED
def test_pinned() -> None:
    expecttest.assert_expected_inline(
        "\n".join(f"{case}: {built(case)}" for case in SOON),
        """\
64/64 causal bent_fold float16 group 4 segments: registers 168, spilled 80/128, shared 200364, in loops 0+0
64/64 band(0,1023) descending bfloat16 group 1 dense: registers 168, spilled 100/124, shared 199276, in loops 2+0
128/128 band(0,1023) spt float16 group 1 segments: registers 168, spilled 32/44, shared 215164, in loops 0+0
128/128 causal bent_fold bfloat16 group 1 segments dense: registers 168, spilled 40/52, shared 214636, in loops 0+0
128/128 full ascending bfloat16 group 1 dense: registers 168, spilled 36/36, shared 214620, in loops 0+0
192/128 causal spt bfloat16 group 1 segments: registers 168, spilled 228/272, shared 231612, in loops 9+8
192/128 full ascending float16 group 1 dense: registers 168, spilled 216/260, shared 231068, in loops 11+12
256/256 causal descending bfloat16 group 1 segments dense: registers 168, spilled 104/128, shared 214168, in loops 0+0""",  # noqa: E501
    )


@PINNED
@pytest.mark.full
def test_others_are_pinned() -> None:
    expecttest.assert_expected_inline(
        "\n".join(f"{case}: {built(case)}" for case in LATER),
        """\
64/64 full ascending bfloat16 group 1 segments: registers 168, spilled 100/124, shared 200316, in loops 5+0
128/128 full ascending bfloat16 group 1 segments: registers 168, spilled 72/100, shared 215164, in loops 0+0
128/128 causal bent_fold bfloat16 group 4 segments: registers 168, spilled 40/68, shared 215212, in loops 0+0
256/256 causal spt bfloat16 group 4 segments: registers 168, spilled 152/184, shared 214440, in loops 0+0""",
    )
