"""The budgets of the Hopper kernels with bounded scores, in both directions, compiled without a GPU.

A bound costs special functions nowhere but on the way of products that are not near, see Note [Shares of the bound] in
`score_gluon`.  That way spills, and is in the loops; the way of near ones has few spills, which are counted here.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import dataclass

import expecttest
import pytest

from dash_inductor.kernels.hopper.backward import build as backward
from dash_inductor.kernels.hopper.forward import build as forward
from dash_inductor.model import Band
from dash_inductor.model.traits import Traits

from ...support import sass
from ...support.calls import traits_of
from ...support.hopper_builds import TILES
from ...support.triton_version import PINNED
from .backward.test_budgets import SHARED_BYTES

FULL, CAUSAL, WINDOW = Band(), Band(0), Band(0, 1023)


@dataclass(frozen=True)
class Case:
    dims: tuple[int, int]
    band: Band
    dtype: str = "bfloat16"
    segment_ids: bool = False
    dense: bool = False
    dropout: bool = False
    low: bool = True

    def __str__(self) -> str:
        others = {"segment_ids": self.segment_ids, "dense": self.dense, "dropout": self.dropout}
        others["any bound"] = not self.low
        words = f"{self.dims[0]}/{self.dims[1]}", str(self.band), self.dtype, *(name for name in others if others[name])
        return " ".join(words)

    @property
    def even(self) -> bool:
        return self.band.is_full and not (self.segment_ids or self.dense)

    def traits(self) -> Traits:
        return traits_of(self.band, self.segment_ids, self.dense, self.dropout, softcap=True, low_scores=self.low)


SOON = [
    Case((64, 64), FULL),
    Case((128, 128), CAUSAL),
    Case((192, 128), CAUSAL),
    Case((256, 256), CAUSAL),
]
# If all tests are run: other masks, dtypes and data.
LATER = [
    Case((64, 64), CAUSAL, "float16"),
    Case((128, 128), CAUSAL, low=False),
    Case((128, 128), FULL),
    Case((128, 128), WINDOW, "float16"),
    Case((128, 128), CAUSAL, segment_ids=True),
    Case((128, 128), CAUSAL, dropout=True),
    Case((256, 256), FULL, "float16"),
    Case((256, 256), CAUSAL, dense=True),
]
cases = pytest.mark.parametrize(
    "case", [pytest.param(c, id=str(c), marks=[pytest.mark.full] if c in LATER else []) for c in (*SOON, *LATER)]
)


@dataclass(frozen=True)
class Built:
    """near: the instructions of each block that has the powers of near products, by operation."""

    report: sass.Report
    shared_memory: int
    near: tuple[Counter[str], ...]
    spills: int

    def __str__(self) -> str:
        r = self.report
        return f"{r.registers} regs, spilled {r.spill_stores}/{r.spill_loads}, {self.spills} near"


def _built(compile: object, powers: int) -> Built:
    kernel, report = sass.compile_with_report(compile)  # type: ignore[arg-type]  # a function
    graph = sass.blocks(sass.disassemble(kernel.asm["cubin"]))
    counted = {start: Counter(map(_operation, block.lines)) for start, block in graph.items()}
    far = {start for start, operations in counted.items() if operations["MUFU"] >= 3 * powers}
    near = [o for start, o in counted.items() if powers <= o["MUFU"] < 3 * powers and o["FFMA"] >= 3 * powers]
    assert far
    spills = sum(o["STL"] + o["LDL"] for start, o in counted.items() if start not in far)
    return Built(report, kernel.metadata.shared, tuple(near), spills)


def _operation(line: str) -> str:
    return re.split(r"[. ]", re.sub(r"^@!?U?P\d+ ", "", line))[0]


@functools.cache
def of_forward(case: Case) -> Built:
    of = forward.Specialisation(case.dtype, *case.dims, case.traits(), case.even)  # type: ignore[arg-type]  # a dtype
    return _built(lambda: forward.Kernels(of).main, of.config.block_kv // 2)


@functools.cache
def of_backward(case: Case) -> Built:
    tiles = TILES[case.dims]
    schedule = "ascending" if case.band.is_full else "spt"
    of = backward.Specialisation(case.dtype, *case.dims, 1, schedule, case.traits(), case.even, tiles)  # type: ignore[arg-type]  # a dtype
    kernels = backward.Kernels(of)
    return _built(lambda: kernels.main, tiles.block_q * tiles.block_kv // 256 // kernels.config.pieces)


def check(used: Built, powers: int, spilled: int, beside: int, others: int) -> None:
    """Near products take one special function and a few other instructions each.

    Args:
        spilled: bytes of a thread.
        beside: instructions that spill in the block of near products.
        others: instructions of a product, the special function not counted.
    """
    assert used.shared_memory <= SHARED_BYTES
    assert used.report.registers <= 168
    assert not used.report.serialised
    assert max(used.report.spill_stores, used.report.spill_loads) <= spilled, str(used)
    assert used.near
    for operations in used.near:
        assert operations["MUFU"] == powers
        assert operations["STL"] + operations["LDL"] <= beside
        assert sum(operations.values()) <= (1 + others) * powers


@cases
def test_the_forward_fits(case: Case) -> None:
    block_kv = forward.FORWARD_CONFIGS[forward.tile_dims(*case.dims)].block_kv
    narrow = case.dims == (64, 64)  # sums by matmul take registers, and less time all the same
    beside = 7 if narrow and case.dtype == "float16" else 2
    check(of_forward(case), block_kv // 2, 768 if narrow else 160, beside, 5)


@cases
def test_the_backward_fits(case: Case) -> None:
    tiles = TILES[case.dims]
    halves = backward.BACKWARD_CONFIGS[backward.tile_dims(*case.dims)].pieces
    data = case.segment_ids or case.dense or case.dropout
    check(of_backward(case), tiles.block_q * tiles.block_kv // 256 // halves, 480 if data else 320, 32, 8)


@PINNED
def test_pinned() -> None:
    lines = [f"{case}: forward {of_forward(case)}; backward {of_backward(case)}" for case in SOON]
    expecttest.assert_expected_inline(
        "\n".join(lines),
        """\
64/64 full bfloat16: forward 128 regs, spilled 0/0, 0 near; backward 168 regs, spilled 72/84, 39 near
128/128 causal bfloat16: forward 168 regs, spilled 76/88, 41 near; backward 168 regs, spilled 20/24, 11 near
192/128 causal bfloat16: forward 168 regs, spilled 24/32, 14 near; backward 168 regs, spilled 216/248, 107 near
256/256 causal bfloat16: forward 168 regs, spilled 64/84, 37 near; backward 168 regs, spilled 0/0, 0 near""",
    )
