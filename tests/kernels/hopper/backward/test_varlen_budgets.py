"""The budgets of the Hopper kernels under masks of rows, compiled without a GPU, and their stores of parts of tiles."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from dash_inductor.kernels.hopper.backward import build
from dash_inductor.model import Band

from ....support import hopper_forward_builds as forward_builds
from ....support import kernel_code, sass
from ....support.cases import some
from ....support.hopper_builds import TILES, Case, built
from ....support.triton_version import PINNED, TRITON
from .test_budgets import HALF, SHARED_BYTES, dependent_launches, is_ordered

PART = r"@%p\d+ st\.global\.v4\.b32"
"""The store of 16 bytes of a tile that is stored in part."""

FULL, CAUSAL, WINDOW = Band(), Band(0), Band(0, 1023)

BACKWARDS = [
    Case((64, 64), FULL, "ascending", HALF, segment_ids=True, varlen=True),
    Case((128, 128), CAUSAL, "spt", group=4, segment_ids=True, varlen=True),
    Case((192, 128), WINDOW, "spt", segment_ids=True, varlen=True),
    Case((256, 256), CAUSAL, "spt", segment_ids=True, varlen=True),
]
FORWARDS = [
    forward_builds.Case((64, 64), CAUSAL, segment_ids=True, varlen=True),
    forward_builds.Case((128, 128), CAUSAL, segment_ids=True, varlen=True),
    forward_builds.Case((192, 128), FULL, HALF, segment_ids=True, varlen=True),
    forward_builds.Case((256, 256), WINDOW, segment_ids=True, varlen=True),
]


@pytest.mark.parametrize("case", BACKWARDS, ids=str)
def test_backwards_fit(case: Case) -> None:
    """As without rows; at head dims of 192 and 128 a step has a few scalars more in memory."""
    used = built(case)
    assert used.shared_memory <= SHARED_BYTES
    assert used.report.registers <= 168
    assert not used.report.serialised
    spilled, in_loop = {
        (192, 128): (300, 30),
        (256, 256): (176 if TRITON >= (3, 9) else 168, 0),
        (64, 64): (176, 10),
    }.get(case.dims, (152, 10))
    assert max(used.report.spill_stores, used.report.spill_loads) <= spilled, str(used)
    assert used.loops.spills <= in_loop, str(used)
    assert used.loops.barriers == case.barriers, "Triton lets warps meet where it is not sure"
    ptx, parts = re.subn(PART, "", used.ptx)  # groups store whole tiles of sums, under no condition
    assert parts
    assert is_ordered(ptx, case.group)


@PINNED
@pytest.mark.parametrize("case", BACKWARDS, ids=str)
def test_code_is_that_of_the_golden_file(case: Case) -> None:
    """A change that should not touch this kernel does not; one that should rewrites the file, see `kernel_code`."""
    assert kernel_code.digest(built(case).ptx) == kernel_code.golden()[str(case)]


@some(FORWARDS, FORWARDS[1:3])
def test_forwards_fit(case: forward_builds.Case) -> None:
    used = forward_builds.built(case)
    assert used.shared_memory <= SHARED_BYTES
    assert not used.report.serialised
    assert not any(step.spills for step in used.steps), str(used)
    outside_steps = {(3, 6): 52, (3, 8): 48}.get(TRITON, 44) if case.dims == (256, 256) else 40
    assert max(used.report.spill_stores, used.report.spill_loads) <= outside_steps, str(used)
    band = CAUSAL if case.mask.is_full else case.mask  # packed documents always test the lower bound
    plain = forward_builds.built(replace(case, mask=band, segment_ids=False, varlen=False, even_kv=False))
    more = {(64, 64): 33, (192, 128): 49}.get(case.dims, 8) if TRITON >= (3, 9) else 8
    for few in (min, max):  # steps without a mask, and with one
        ours, theirs = (few(step.instructions for step in each.steps) for each in (used, plain))
        assert ours <= theirs + more, "a step is that of the band"


@pytest.mark.parametrize("case", [BACKWARDS[1], FORWARDS[1]], ids=str)
def test_parts_of_tiles_are_stored_in_vectors(case: Case | forward_builds.Case) -> None:
    """16 bytes of a thread at a time, under a condition; whole tiles by TMA."""
    ptx = built(case).ptx if isinstance(case, Case) else forward_builds.built(case).ptx
    assert re.search(PART, ptx)
    assert not re.search(r"st\.global\.(b16|v2\.b16)", ptx)
    assert "cp.async.bulk.tensor.4d.global.shared::cta" in ptx


def test_every_variant_has_cases() -> None:
    assert {build.tile_dims(*case.dims) for case in BACKWARDS} == {build.tile_dims(*d) for d in TILES}


@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (256, 256)], ids=str)
def test_prepare_and_finish(dims: tuple[int, int]) -> None:
    kernels = build.Kernels(Case(dims, CAUSAL, "spt", HALF, 4, segment_ids=True, varlen=True).specialisation())
    for compile in (lambda: kernels.prepare, lambda: kernels.finish):
        _, report = sass.compile_with_report(compile)
        assert max(report.spill_stores, report.spill_loads) <= 8
    assert dependent_launches(kernels.prepare.asm["ptx"]) == ["launch_dependents"]
    assert dependent_launches(kernels.finish.asm["ptx"]) == ["wait"]
