"""The budget of the Hopper backward with dropout, compiled without a GPU."""

from __future__ import annotations

from dataclasses import replace

import expecttest
import pytest

from dash_inductor.kernels.hopper.backward import build
from dash_inductor.model import Band

from ....support import kernel_code
from ....support.hopper_builds import TILES, Case, built
from ....support.triton_version import PINNED
from .test_budgets import HALF, SHARED_BYTES, is_ordered

FULL, CAUSAL = Band(), Band(0)

CASES = [
    Case((64, 64), FULL, "ascending", dropout=True),
    Case((64, 64), CAUSAL, "bent_fold", HALF, 4, dropout=True),
    Case((128, 128), FULL, "ascending", dropout=True),
    Case((128, 128), CAUSAL, "bent_fold", dropout=True),
    Case((128, 128), FULL, "ascending", segment_ids=True, dropout=True),
    Case((128, 128), CAUSAL, "bent_fold", segment_ids=True, dense=True, dropout=True),
    Case((192, 128), FULL, "ascending", HALF, dropout=True),
    Case((192, 128), CAUSAL, "spt", dropout=True),
    Case((256, 256), CAUSAL, "spt", group=4, dropout=True),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)

WORDS = 32
"""Bytes of shared memory that the ring of words takes: 16 for each of its two stages."""


@cases
def test_fits(case: Case) -> None:
    """Shared memory, registers, no matrix instruction made to wait; spills of scalars and bits, never of tiles."""
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
    if case.dims == (256, 256):
        return 40, 0
    if case.dims == (192, 128):
        return (180, 32) if case.mask.is_full else (256, 80)
    return (270, 32) if case.dense else (130, 32)


@cases
def test_bits_are_exchanged_by_shuffles(case: Case) -> None:
    """Random bits take no shared memory, but two shuffles for eight scores of a thread.

    They depend on the q tile, which consumers read from the word of the step, as they do where something is masked:
    without either there are no words, and no ring of them.
    Warps do not meet where bits are kept behind matmuls.  They meet twice in a step, wherever it stands in the code.
    """
    without = replace(case, dropout=False)
    plain = built(without)
    used = built(case)
    has_words = not case.mask.is_full or not case.even_kv or case.segment_ids or case.dense
    assert used.shared_memory - plain.shared_memory == (0 if has_words else WORDS)
    assert used.ptx.count("bar.sync") == plain.ptx.count("bar.sync") - 2 * (without.step_texts - 1)
    tiles = TILES[case.dims]
    scores = tiles.block_q * tiles.block_kv // (32 * build.WARPS)
    assert used.ptx.count("shfl.sync.bfly") == scores // 4
    assert "shfl.sync.bfly" not in plain.ptx


@PINNED
@cases
def test_code_is_that_of_the_golden_file(case: Case) -> None:
    """A change that should not touch this kernel does not; one that should rewrites the file, see `kernel_code`."""
    assert kernel_code.digest(built(case).ptx) == kernel_code.golden()[str(case)]


@cases
def test_adds_are_ordered(case: Case) -> None:
    assert is_ordered(built(case).ptx, case.group)


def test_every_variant_has_cases() -> None:
    assert {build.tile_dims(*case.dims) for case in CASES} == set(build.BACKWARD_CONFIGS)


@PINNED
def test_pinned() -> None:
    expecttest.assert_expected_inline(
        "\n".join(f"{case}: {built(case)}" for case in CASES),
        """\
64/64 full ascending bfloat16 group 1 dropout: registers 168, spilled 0/0, shared 199196, in loops 0+0
64/64 causal bent_fold float16 group 4 dropout: registers 168, spilled 16/32, shared 199244, in loops 0+0
128/128 full ascending bfloat16 group 1 dropout: registers 168, spilled 4/4, shared 214556, in loops 0+0
128/128 causal bent_fold bfloat16 group 1 dropout: registers 168, spilled 24/36, shared 214572, in loops 2+0
128/128 full ascending bfloat16 group 1 segments dropout: registers 168, spilled 48/72, shared 215164, in loops 0+0
128/128 causal bent_fold bfloat16 group 1 segments dense dropout: registers 168, spilled 68/104, shared 214636, in loops 10+0
192/128 full ascending float16 group 1 dropout: registers 168, spilled 136/156, shared 231004, in loops 21+0
192/128 causal spt bfloat16 group 1 dropout: registers 168, spilled 220/252, shared 231004, in loops 55+8
256/256 causal spt bfloat16 group 4 dropout: registers 168, spilled 20/36, shared 214184, in loops 0+0""",  # noqa: E501
    )
