"""The kernels that build tables from the data of a mask: in Triton's interpreter, compiled, and their host side."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton.compiler import ASTSource

from dash_inductor.errors import ArgumentError
from dash_inductor.kernels.common import mask_tables
from dash_inductor.kernels.common.compiling import compile_kernel, schedule_module
from dash_inductor.kernels.common.device import document_tables, segment_ids, tables, tile_pairs
from dash_inductor.kernels.common.device.relations.between import KV_RANGES, RANKS
from dash_inductor.kernels.common.device.relations.congruent import PROGRESSIONS
from dash_inductor.kernels.common.device.relations.equal import SEGMENT_IDS
from dash_inductor.kernels.common.mask_data import MaskData
from dash_inductor.kernels.common.relations import Layout
from dash_inductor.kernels.portable import standalone
from dash_inductor.kernels.reference import tables as reference_tables
from dash_inductor.model.mask import Band
from dash_inductor.model.plan import Plan, Tiles
from dash_inductor.operators.mask_tables import mask_tables as operator

from ...support.forks import interpreted
from ...support.table_words import values_of

COUNTS = {
    "vectors": (1, 3),
    "intervals": (2, 12),
    "head_intervals": (4, 30),
    "dilations": (1, 12),
    "documents": (4, 40),
    "packed_documents": (6, 200),
    "documents_of_masks": (6, 60),
    "verdicts": (6, 60),
    "dense": (1, 3),
    "seen_bits": (2, 6),
    "united": (2, 6),
    "bent": (1, 2),
    "extreme": (1, 2),
    "alone": (1, 1),
    "altered": (1, 1),
}
"""Masks of each kind: always, and where all tests are run."""


def compared(counts: dict[str, int]) -> list[str]:
    """The answers of Triton's interpreter, in a process of its own, for every kind of masks."""
    return interpreted("tables", *(str(word) for pair in counts.items() for word in pair))


@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.full)], ids=["some", "all"])
def test_word_by_word_against_the_definition(which: int) -> None:
    """Random masks, tile shapes, heads, strides and dtypes; see `interpreted.tables`."""
    counts = {kind: numbers[which] for kind, numbers in COUNTS.items()}
    found = compared(counts)
    assert [f"RESULT {kind} compared {number}" in found for kind, number in counts.items()] == [True] * len(counts)


Kernel = tuple[Any, dict[str, Any], dict[str, str]]
SEGMENTED, RANKED, OF_POSITIONS = Layout.of([SEGMENT_IDS]), Layout.of([SEGMENT_IDS, RANKS]), Layout.of([KV_RANGES])
ALL, OF_VECTORS = (
    tile_pairs.Mask(True, True, *SEGMENTED, True, False, False, has_dense) for has_dense in (True, False)
)
OF_INTERVALS = tile_pairs.Mask(True, True, *RANKED, True, False, True, False)
OF_PROGRESSIONS = tile_pairs.Mask(True, True, *Layout.of([PROGRESSIONS]), False, False, True, False)
OF_KV_RANGES = tile_pairs.Mask(True, True, *OF_POSITIONS, False, True, True, False)
OF_IDS, OF_DENSE = ("ids_b", "ids_i", "ids_j", "kv_ids_b", "kv_ids_j"), ("dense_b", "dense_h", "dense_i", "dense_j")
STRIDES = dict.fromkeys((*OF_IDS, *OF_DENSE, "valid_b", "valid_j"), "i64")
TYPES = {
    **STRIDES,
    **dict.fromkeys(("Q_IDS", "KV_IDS", "STARTS"), "*i64"),
    **dict.fromkeys(("VALID", "DENSE", "Q_FOUND", "KV_FOUND", "KEYS_SEEN"), "*i1"),
    **dict.fromkeys(
        (
            "Q_SEGMENT_IDS",
            "KV_SEGMENT_IDS",
            "Q_VECTORS",
            "KV_VECTORS",
            "RANGES",
            "RANKS",
            "VISITS",
            "STEPS",
            "CONTRIBUTIONS",
            "COUNTS",
        ),
        "*i32",
    ),
    **dict.fromkeys(("KINDS", "FINE"), "*i8"),
    "SEEN_BITS": "*i32",
}
BENT, SPT = schedule_module("bent_fold", Band(0)), schedule_module("spt", Band(0, 99))
TOKENS = {"TOKENS": segment_ids.Tokens(mask_tables.TOKENS, mask_tables.PARTNERS, mask_tables.TOKEN_TILES)}
DENSE_PAIRS = tile_pairs.Pairs(64, 128, mask_tables.DENSE_Q_TILES, mask_tables.DENSE_KV_TILES, mask_tables.LINES)
PAIRS = tile_pairs.Pairs(64, 128, mask_tables.Q_TILES, mask_tables.KV_TILES, mask_tables.LINES)
TILE_SCHEDULE = {"BLOCK_Q": 64, "BLOCK_KV": 128}
KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "find_starts": (segment_ids.find_starts, {"BLOCK": mask_tables.TOKENS}),
    "first_equal": (segment_ids.first_equal, {"HAS_IDS": True, "HAS_VALID": True, "QUERIES": 1, "KEYS": 1, **TOKENS}),
    "seen": (tile_pairs.seen, {"MASK": ALL, **TOKENS}),
    "seen by vectors": (tile_pairs.seen, {"MASK": OF_VECTORS, **TOKENS}),
    "seen by intervals": (tile_pairs.seen, {"MASK": OF_INTERVALS, **TOKENS}),
    "classify": (tile_pairs.classify, {"MASK": ALL, "PAIRS": DENSE_PAIRS}),
    "classify by intervals": (tile_pairs.classify, {"MASK": OF_INTERVALS, "PAIRS": PAIRS}),
    "classify by kv ranges": (tile_pairs.classify, {"MASK": OF_KV_RANGES, "PAIRS": PAIRS}),
    "classify by progressions": (tile_pairs.classify, {"MASK": OF_PROGRESSIONS, "PAIRS": PAIRS}),
    "classify by vectors": (tile_pairs.classify, {"MASK": OF_VECTORS, "PAIRS": PAIRS}),
    "write_seen": (tile_pairs.write_seen, {"MASK": ALL, "BLOCK_Q": 64, "BLOCK_KV": 128, "WORDS": 2}),
    "unite_kinds": (tile_pairs.unite_kinds, {"HIGH": 2, "WIDE": 2, "BLOCK_KV": 128, "COLUMNS": mask_tables.COLUMNS}),
    "rank_contributors": (
        tables.rank_contributors,
        {**TILE_SCHEDULE, "RANK": BENT.dash_rank, "ROWS": mask_tables.ROWS, "COLUMNS": mask_tables.COLUMNS},
    ),
    "write_tile_schedules": (
        tables.write_tile_schedules,
        {**TILE_SCHEDULE, "TILE_SCHEDULE_LENGTH": BENT.dash_visits, "Q_TILE": BENT.dash_q_tile,
            "COLUMNS": mask_tables.COLUMNS},
    ),
    "write_document_tables": (
        document_tables.write_document_tables,
        {"TILE_SCHEDULE_LENGTH": SPT.dash_visits, "Q_TILE": SPT.dash_q_tile, "RANK": SPT.dash_rank,
            "KV_RANGE": SPT.dash_kv_range,
            "BLOCKS": document_tables.Blocks(64, 128, mask_tables.ALIGNMENT, mask_tables.SLOTS, mask_tables.COLUMNS)},
    ),
    "write_rows": (
        tables.write_rows,
        {"FROM_THE_END": True, "CONSUMERS": 3, "BLOCK_KV": 128, "COLUMNS": mask_tables.COLUMNS},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_fits_the_architecture(name: str) -> None:
    """Any Triton: no spills to speak of, little shared memory, nothing accumulated in memory."""
    function, constants = KERNELS[name]
    anywhere = dict.fromkeys(("VALID", "DENSE"), 1)
    built = compile_kernel(function, ASTSource, constants, TYPES, {"num_warps": 4}, anywhere)
    used = standalone.resources(built, "sm_90")
    assert max(used.spill_stores, used.spill_loads) <= 64, used
    assert used.shared_memory <= 48 << 10, used
    assert not re.search(r"\b(red|atom)\.", built.asm["ptx"])


# ------------------------------------------------------------------------------------------------------- the host side

VALID = torch.ones(2, 40, dtype=torch.bool)
IDS = torch.zeros(2, 30, dtype=torch.int64), torch.zeros(2, 40, dtype=torch.int32)
PLAN = Plan("hopper", "spt", "hopper", Tiles(8, 16, 8, 2), forward_tiles=Tiles(128, 16, 8, 2))


def data(valid: torch.Tensor | None = VALID, **more: Any) -> MaskData:
    return MaskData(Band(), 2, 4, 2, 30, 40, values_of(valid, **more))


def build(plan: Plan, **sizes: int) -> object:
    return reference_tables.build(replace(data(), **sizes), plan)


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: data(None), "values=()"),
    (lambda: data(VALID[:, :39]), "keys.valid.shape=(2, 39) is not allowed: expected [2, 40]"),
    (lambda: data(VALID[0]), "keys.valid.shape=(40,)"),
    (lambda: data(VALID.float()), "keys.valid.dtype=torch.float32"),
    (lambda: data(segments=(IDS[0], IDS[1][:1])), "segments.kv.shape=(1, 40)"),
    (lambda: data(None, segments=(IDS[1], IDS[0])), "segments.q.shape=(2, 40) is not allowed: expected [2, 30]"),
    (lambda: data(None, segments=(IDS[0], IDS[1].bool())), "segments.kv.dtype=torch.bool"),
    (lambda: data(VALID.to("meta"), segments=IDS), "keys.valid.device='meta' is not allowed: expected cpu"),
    (lambda: data(None, dense=torch.ones(2, 3, 30, 40, dtype=torch.bool)), "dense.mask.shape=(2, 3, 30, 40)"),
    (lambda: data(None, dense=torch.ones(1, 1, 30, 40)), "dense.mask.dtype=torch.float32"),
    (lambda: build(replace(PLAN, forward="keep", forward_tiles=None)), "plan.forward_tiles=None"),
    (lambda: build(replace(PLAN, schedule="shift")), "schedule='shift' is not allowed"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        call()


# -------------------------------------------------------------------------------------------------------- the operator

SIZES = (30, 40, 2, 4, 2)
CALLS: dict[str, tuple[str, list[torch.Tensor], str]] = {
    "keys": ("causal & keys(1)", [VALID, VALID], "bent_fold"),
    "segments": ("segments(0,1)", list(IDS), "spt"),
    "dense": ("dense(0)", [torch.ones(2, 1, 30, 40, dtype=torch.bool)], "spt"),
    "dense by head": ("causal & dense(0)", [torch.ones(1, 4, 30, 1, dtype=torch.bool)], "bent_fold"),
    "all": ("causal & segments(0,1) & keys(2) & dense(3)", [*IDS, VALID, torch.ones(1, 4, 1, 40).bool()], "bent_fold"),
}


@pytest.mark.parametrize("has_backward", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_fakes_have_the_real_shapes(name: str, has_backward: bool) -> None:
    mask, extras, schedule = CALLS[name]
    facts = (*SIZES, mask, str(replace(PLAN, schedule=schedule)), has_backward)
    real = operator(extras, *facts)
    with FakeTensorMode() as mode:
        fake = operator([mode.from_tensor(t) for t in extras], *facts)
    described = [[(t.shape, t.dtype, t.stride(), t.device) for t in tensors] for tensors in (real, fake)]
    assert described[0] == described[1]


@pytest.mark.parametrize("mask", ["causal & keys(0)", "dense(0)"])
def test_lengths_may_be_symbolic(mask: str) -> None:
    def run(valid: torch.Tensor) -> list[torch.Tensor]:
        length = valid.shape[1]
        extra = valid if "keys" in mask else valid[:, None, None, :] & valid[:, None, :, None]
        found: list[torch.Tensor] = operator([extra], length, length, valid.shape[0], 4, 2, mask, str(PLAN), True)
        return found

    graph = make_fx(run, tracing_mode="symbolic")(torch.ones(3, 77, dtype=torch.bool))
    assert operator in {node.target for node in graph.graph.nodes}
    for batch, length in ((2, 40), (5, 130)):
        valid = torch.arange(length).expand(batch, -1) % 7 != 0
        assert all(map(torch.equal, graph(valid), run(valid)))


def test_a_tensor_that_is_not_there() -> None:
    with pytest.raises(ArgumentError, match="the mask keys\\(1\\) reads number 1"):
        operator([VALID], *SIZES, "keys(1)", str(PLAN), True)
