"""No address depends on a product of 32 bits that may need more of them: read in the compiler's first code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import triton
import triton.language as tl
from torch import Tensor

from dash_inductor.kernels.common import mask_tables
from dash_inductor.kernels.common.arguments import Group
from dash_inductor.kernels.common.mask_data import MaskData
from dash_inductor.kernels.hopper.backward import arguments as of_backward
from dash_inductor.kernels.hopper.backward import build as backward_build
from dash_inductor.kernels.hopper.forward import arguments as of_forward
from dash_inductor.kernels.hopper.forward import build as forward_build
from dash_inductor.kernels.hopper.forward import few as few_queries
from dash_inductor.kernels.hopper.shared import arguments as shared
from dash_inductor.kernels.portable import standalone
from dash_inductor.model import AttentionSpec, Band, Mask, Site, Tiles
from dash_inductor.passes.ops.kernels.groups.device import behind
from dash_inductor.passes.ops.kernels.sums.device import one_hot_matmul as few
from dash_inductor.passes.ops.kernels.sums.device import segments
from dash_inductor.planning import plan
from dash_inductor.schedule.table_tile_schedule import TILE_BITS
from dash_inductor.upstream.triton_compiler import ASTSource, GPUTarget

from ..support import hopper_builds, hopper_forward_builds
from ..support.portable_builds import stages
from ..support.portable_plans import portable_plan
from ..support.varlen_layout import Rows, mask_of
from .common.test_table_builds import BATCH, HEADS, LENGTH, MASKS, TYPES, operands
from .narrow_offsets import narrow_products, narrowed

OF_SUMS = {"VALUES": "*bf16", "KEYS": "*i32", "ORDER": "*i64", "OUT": "*bf16", "PARTS": "*fp32", "PART_KEYS": "*i32"}


def ttir(kernel: Any, constants: dict[str, Any], types: dict[str, str]) -> str:
    """The code of a kernel of which arguments of no other type are int32."""
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs)
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ttir"])


@triton.jit
def _far_columns(OUT, apart, count):  # type: ignore[no-untyped-def]
    column = tl.arange(0, 32)
    for row in range(count):
        OUT += row.to(tl.int64) * apart  # type: ignore[attr-defined]
        tl.store(OUT + column * apart, 0.0, mask=column < count)


def test_a_narrow_product_is_found() -> None:
    (found,) = narrow_products(ttir(_far_columns, {}, {"OUT": "*fp32"}))
    assert "tensor<32xi32>" in found
    assert not narrow_products(ttir(_far_columns, {}, {"OUT": "*fp32", "apart": "i64"}))
    assert not narrow_products(ttir(_far_columns, {}, {"OUT": "*fp32"}), arguments="count".__eq__)


SUMS = [
    (
        segments.walk_segments,
        {"CHUNK": 64, "COLUMNS": 128, "HAS_ORDER": True, "HAS_BASE": True, "IS_LAST": False},
    ),
    (segments.scan_segments, {"CHUNK": 256, "COLUMNS": 16, "HAS_ORDER": True, "HAS_BASE": True, "IS_LAST": False}),
    (few.sum_chunks, {"ROWS": 32, "CHUNK": 512, "STEP": 64, "COLUMNS": 64}),
    (few.add_parts, {"GROUP": 64, "BLOCK": 512, "HAS_BASE": True}),
    *((behind.fill_behind, {"DIM": dim, "PROGRAMS": 512, "BLOCK": 1024}) for dim in (0, 1)),
]


@pytest.mark.parametrize(("kernel", "constants"), SUMS, ids=lambda x: getattr(x, "__name__", ""))
def test_sums_and_groups(kernel: Any, constants: dict[str, Any]) -> None:
    assert not narrow_products(ttir(kernel, constants, {**OF_SUMS, "OFFSETS": "*i32"}))


PACKED = str(mask_of(Band(0, 99)))


@pytest.mark.parametrize("text", [*MASKS, PACKED])
def test_tables(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the place of a tile pair of the backward, whose tiles have few enough numbers."""
    assert 2 * TILE_BITS < 31
    mask, seen = Mask.parse(text), []

    def read(self: Any, kernel: Any, grid: Any, *arguments: Tensor | int, **constants: Any) -> None:
        given = iter(arguments)
        types = {}
        for name in kernel.arg_names:
            argument = 0 if name in constants else next(given)
            types[name] = TYPES[argument.dtype] if isinstance(argument, Tensor) else "i32"
        seen.append(kernel.__name__)
        numbers = {"rank_contributors": "n_q", "write_tile_schedules": "n_q"}.get(kernel.__name__)
        assert not narrow_products(ttir(kernel, constants, types), arguments=lambda name: name != numbers), seen[-1]

    monkeypatch.setattr(mask_tables._Builder, "_launch", read)
    packed = Rows((LENGTH,))
    batch, length = (1, packed.rows) if text == PACKED else (BATCH, LENGTH)
    site = Site("cuda", "bfloat16", batch, HEADS, HEADS, length, length, 128, 128, AttentionSpec(mask, 0.1))
    tensors = packed.operands() if text == PACKED else operands(mask)
    mask_tables.build(MaskData.of(mask, tensors, (batch, HEADS, HEADS, length, length)), plan(site, "sm_90"))
    assert ("write_document_tables" if text == PACKED else "write_rows") in seen


CALLS = [
    ("causal/scale=0.25", "spt"),
    ("causal & segments(0,0)/scale=0.25/bias=1+gradient", "two_pass"),
    ("dense(0)/scale=0.25/sinks=1", "spt"),
    ("interval(0,1,none) & keys(2)/scale=0.25/dropout=0.1,3/grad_logsumexp=4", "two_pass"),
]
FAR = 1 << 30
"""A stride that fits into 32 bits where the last offset of no tensor does."""


@pytest.mark.parametrize(("text", "schedule"), CALLS)
def test_portable(text: str, schedule: str) -> None:
    """Of strides that are constants, as Inductor writes them, of which one is far at a time."""
    site = Site("cuda", "bfloat16", 4, 8, 4, 300, 333, 64, 64, AttentionSpec.parse(text))
    planned = replace(portable_plan(site, "sm_90", schedule), forward="portable", forward_tiles=Tiles(64, 64, 4, 2))
    shapes = standalone._tensors(site)
    for dim in range(4):
        strides = {}
        for name, (shape, _) in shapes.items():
            of = standalone._contiguous(shape)
            if len(of) > 1:
                of[min(dim, len(of) - 1)] = FAR
            strides[name] = of
        kernels = [*standalone.render(planned, site, strides), standalone.render_forward(planned, site, strides)]
        for kernel in kernels:
            code = stages(kernel, "sm_90", "ttir")["ttir"]
            assert not narrow_products(code, arguments=lambda _: False, constant=1 << 20), kernel.names


def test_indices_of_near_elements_stay_narrow() -> None:
    site = Site("cuda", "bfloat16", 2, 4, 2, 300, 333, 64, 64, AttentionSpec.parse("causal/scale=0.25"))
    for kernel in standalone.render(portable_plan(site, "sm_90"), site):
        assert "INDEX_DTYPE: tl.constexpr = tl.int32" in kernel.text


GROUPS = [
    of_backward.GRAD_LSE, of_backward.OUT_STRIDES, of_backward.LSE_STRIDES, of_forward.SINKS,
    of_forward.FEW_STRIDES, shared.target("bf16"),
]  # fmt: skip
STRIDES = {"b", "h", "row", "batch_stride", "head_stride", "row_stride"}


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_strides_of_hopper_kernels_are_wide(group: Group) -> None:
    assert {group.types[name] for name in STRIDES & group.types.keys()} == {"i64"}


def hopper_kernels() -> list[Any]:
    """Compiled kernels that read data and write tokens."""
    full, causal = Mask.parse("full").band, Mask.parse("causal").band
    backwards = [
        hopper_builds.Case((64, 64), causal, "bent_fold", group=4, segment_ids=True, dense=True),
        hopper_builds.Case((64, 64), full, "ascending", segment_ids=True, varlen=True),
    ]
    forwards = [
        hopper_forward_builds.Case((64, 64), causal, dense=True),
        hopper_forward_builds.Case((64, 64), causal, segment_ids=True, varlen=True),
    ]
    kernels = [backward_build.Kernels(case.specialisation()) for case in backwards]
    found = [kernel for of in kernels for kernel in (of.prepare, of.main, of.finish)]
    found += [forward_build.Kernels(case.problem()).main for case in forwards]
    of_few = few_queries.Kernels(few_queries.Specialisation("bfloat16", 128, 128, 16))
    return [*found, of_few.attend, of_few.combine]


def test_hopper_kernels_keep_what_is_wide() -> None:
    """The offsets of 32 bits are numbers of rows, tiles and tables, which the host has counted."""
    for kernel in hopper_kernels():
        code = kernel.asm.get("ttir") or kernel.asm["ttgir"]
        assert "tt.addptr" in code
        assert not narrowed(code), kernel.metadata.name
