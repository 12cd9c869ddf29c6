"""Dropout in the Hopper forward without a GPU: its random bits, how it compares them, and what it costs."""

from __future__ import annotations

import ast
import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dash_inductor.kernels.hopper.forward import build
from dash_inductor.kernels.hopper.forward.device import dropout
from dash_inductor.kernels.hopper.shared.device.dropout import negative_where_dropped
from dash_inductor.kernels.reference.dropout import philox, ranks
from dash_inductor.model import Band
from dash_inductor.model import dropout as definition

from ....support import compared, sass
from ....support.cases import some
from ....support.hopper_dropout import bound_of
from ....support.hopper_forward_builds import Case, built
from ....support.triton_version import TRITON

LOW = 0xFFFFFFFF


class Words:
    """Unsigned numbers of 32 bits, or of 64: int64 that wraps around."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    def to(self, mask: int) -> Words:
        return Words(self.numbers & mask)

    def __add__(self, other: int) -> Words:
        return Words(self.numbers + other & LOW)

    def __mul__(self, other: int) -> Words:
        return Words(self.numbers * other)

    def __rshift__(self, count: int) -> Words:
        return Words(self.numbers >> count & (1 << 64 - count) - 1)

    def __xor__(self, other: Words) -> Words:
        return Words(self.numbers ^ other.numbers)


def device_functions() -> dict[str, Any]:
    """The names of `dropout` as plain Python."""
    tree = ast.parse(inspect.getsource(dropout))
    tree.body = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom, ast.ClassDef))]
    gl = SimpleNamespace(constexpr=lambda x: x, uint32=LOW, uint64=-1, static_range=range)
    names: dict[str, Any] = {
        "gl": gl, "gluon": SimpleNamespace(jit=lambda f: f, constexpr_function=lambda f: f), "ROWS": 64,
        "definition": definition,
    }  # fmt: skip
    exec(compile(tree, dropout.__file__ or "", "exec"), names)
    return names


@pytest.mark.parametrize("seed", [0, 0x0123456789ABCDEF, -1, -(1 << 63)])
def test_words_are_those_of_the_definition(seed: int) -> None:
    """Counters that broadcast, as rows, keys, a head and a batch element do."""
    g = torch.Generator().manual_seed(0)
    shapes = (32, 1), (1, 32), (1, 1), (1, 1)
    counter = [torch.randint(0, 1 << 32, shape, generator=g) for shape in shapes]
    key = torch.tensor(seed & LOW), torch.tensor(seed >> 32 & LOW)
    expected = philox(torch.broadcast_tensors(*counter), key)  # type: ignore[arg-type]  # four of them
    got = device_functions()["_philox"](*map(Words, counter), tuple(map(Words, key)))
    assert all(torch.equal(a, b.numbers) for a, b in zip(expected, got, strict=True))


THRESHOLDS = [0, 1, 2, 6554, 0x7F80, 0x7F82, 0x7FFF, 0x8000, 0x8001, 0x807E, 0x8080, 0xC000, 0xFFFE, 0xFFFF]


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_both_halves_are_compared_with_the_bound(threshold: int) -> None:
    """All sets of bits in one half, and special ones in the other; the kernels of both directions agree."""
    numbers = torch.arange(1 << 16)
    dropped = (ranks(numbers) < threshold) if threshold <= 1 << 15 else (ranks(numbers) >= (1 << 16) - threshold)
    assert dropped.sum() == threshold
    bound = int(bound_of(threshold))
    for other in {0, 0xFFFF, 0x7F80, 0x7F81, 0x8000, 0xFF80, 0xFF81, bound & 0xFFFF, (bound - 1) & 0xFFFF}:
        for words, low in ((numbers | other << 16, True), (numbers << 16 | other, False)):
            halves = (dropped, dropped[other]) if low else (dropped[other], dropped)
            operands = {"$1": 0x3F80BF80, "$2": words.numpy(), "$4": bound, "$6": threshold}
            got = compared.run(text_of(dropout._keep_from), operands)["$0"]
            assert (got & 0xFFFF == np.where(halves[0], 0, 0xBF80)).all()
            assert (got >> 16 == np.where(halves[1], 0, 0x3F80)).all()
            operands = {"$2": 0.5, "$3": 2.0, "$4": words.numpy(), "$5": bound, "$7": threshold}
            values = compared.run(text_of(negative_where_dropped), operands)
            assert (values["$0"] == np.where(halves[0], -0.5, 0.5)).all()
            assert (values["$1"] == np.where(halves[1], -2.0, 2.0)).all()


def text_of(function: Any) -> str:
    """The inline assembly of a device function."""
    source = inspect.getsource(function.fn)
    return source[source.index("{") : source.index("}") + 1]


FULL, CAUSAL, WINDOW = Band(), Band(0), Band(0, 1023)
HALF = "float16"

# The longest step without a mask, its spills, and bytes spilled anywhere.
CASES = {
    Case((64, 64), FULL, dropout=True): (730, 0, 110),
    Case((64, 64), CAUSAL, HALF, even_kv=False, dropout=True): (750, 12, 260),
    Case((128, 128), FULL, dropout=True): (800, 0, 40),
    Case((128, 128), CAUSAL, even_kv=False, segment_ids=True, dropout=True): (820, 0, 64),
    Case((192, 128), CAUSAL, even_kv=False, dropout=True): (815, 0, 90),
    Case((256, 256), FULL, HALF, dropout=True): (605, 0, 40),
}
SOON = [Case((64, 64), FULL, dropout=True), Case((128, 128), CAUSAL, even_kv=False, segment_ids=True, dropout=True)]
cases = some(CASES, SOON)


@cases
def test_fits(case: Case) -> None:
    """A step draws the bits of a thread's scores, as many as 10 multiplications of 32 bits for 8 of them, and no more.

    Of a step without dropout nothing is lost: matrix instructions, exponentials and roundings are as many.
    """
    used, (length, spills, spilled) = built(case), CASES[case]
    assert not used.report.serialised
    assert used.shared_memory <= 227 << 10
    if TRITON >= (3, 9) and case.segment_ids:
        spilled = 176  # once for a tile schedule, not in a step
    assert max(used.report.spill_stores, used.report.spill_loads) <= spilled, str(used)
    config = case.problem().config
    block_kv, head_dim = config.block_kv, case.dims[0]
    for step in used.steps:
        assert step.operations["HGMMA"] == head_dim // 16 + block_kv // 16
        assert step.operations["MUFU"] == block_kv // 2 + 2
        assert step.operations["F2FP"] == block_kv // 4
    shortest = sorted(used.steps, key=lambda step: step.instructions)[: config.consumers]
    for step in shortest:
        assert step.instructions <= length, str(used)
        assert step.spills <= spills
        assert step.operations["LOP3"] <= 1.1 * block_kv


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_bits_are_drawn_while_scores_are_computed(dims: tuple[int, int]) -> None:
    """Nearly all lie between the last matrix instruction of a step's scores and the first one of the product."""
    case = Case(dims, FULL, dropout=True)
    text = sass.disassemble(build.Kernels(case.problem()).main.asm["cubin"])
    lines = text.splitlines()
    waits = [i for i, line in enumerate(lines) if "WARPGROUP.DEPBAR.LE gsb0, 0x1" in line]
    assert len(waits) == case.problem().config.consumers
    scores, product = (count // 16 for count in (dims[0], case.problem().config.block_kv))
    for wait in waits:
        matmuls = [i for i in range(wait) if "HGMMA" in lines[i]][-scores - product :]
        assert "RZ, !UPT" in lines[matmuls[0]]
        drawn = [i for i in range(matmuls[0], wait) if "IMAD.WIDE" in lines[i] or "IMAD.HI" in lines[i]]
        between = [i for i in drawn if matmuls[scores - 1] < i < matmuls[scores]]
        assert len(between) >= 75
        assert len(drawn) - len(between) <= 5
