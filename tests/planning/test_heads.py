"""Tile schedules and ranks do not know the heads: neither the expressions of any schedule, nor the plan that chooses
one.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import fields, replace

import pytest
import sympy

from dash_inductor.model import AttentionSpec, Band, Bias, Mask, Operand, Site
from dash_inductor.model.architectures import SAME_AS, WORKERS
from dash_inductor.planning import plan
from dash_inductor.schedule.codegen import SIGNATURES, TILE_SCHEDULE
from dash_inductor.schedule.schedules import NAMES, Schedule, define, supports
from dash_inductor.schedule.symbols import (
    BLOCK_KV,
    BLOCK_Q,
    CTA_INDEX,
    HEAD_CHUNK,
    HEADS,
    HI,
    KV,
    KV_LEN,
    LO,
    PART,
    Q_LEN,
    STEP,
    WORK_ID,
    Expr,
    Q,
    Rem,
)

FACTS = {Q_LEN, KV_LEN, LO, HI, BLOCK_Q, BLOCK_KV}
OWN: dict[str, set[Expr]] = {
    "ctas_per_head": set(),
    "kv_tile": {CTA_INDEX, PART},
    "num_steps": {KV},
    "q_tile": {KV, STEP},
    "rank": {Q, KV},
    "visible": {Q, KV},
    "launch": {WORK_ID, HEADS, HEAD_CHUNK},
    "resident": {HEADS, HEAD_CHUNK},  # how many CTAs a launch needs, which the host asks before
}
"""The symbols that each expression of a schedule may read beside the facts of a tile schedule."""
BANDS = [Band(), Band(0), Band(0, None, "bottom_right"), Band(0, 9), Band(-3, 7), Band(None, 5), Band(-9), Band(40, 60)]


def symbols(value: object) -> set[Expr]:
    """The symbols of an expression, or of all that a tuple or a dataclass holds."""
    if isinstance(value, sympy.Basic):
        return set(value.free_symbols)
    if isinstance(value, tuple):
        return set().union(*map(symbols, value))
    return set().union(*(symbols(getattr(value, f.name)) for f in fields(value)))  # type: ignore[arg-type]  # dataclass


def forbidden(s: Schedule) -> dict[str, set[Expr]]:
    """The symbols that the expressions of a schedule read and may not, by name."""
    found = {name: symbols(getattr(s, name)) - FACTS - own for name, own in OWN.items() if getattr(s, name) is not None}
    return {name: others for name, others in found.items() if others}


@pytest.mark.parametrize("name", NAMES)
def test_expressions_of_tile_schedules_and_ranks_have_no_heads(name: str) -> None:
    assert set(OWN) == {f.name for f in fields(Schedule)} - {"name", "parts", "shared_accumulator"}
    for band in BANDS:
        if supports(name, band) is None:
            s = define(name, band)
            assert forbidden(s) == {}, band
            assert {WORK_ID, HEADS, HEAD_CHUNK} <= symbols(s.launch)


@pytest.mark.parametrize("field", ["ctas_per_head", "kv_tile", "num_steps", "q_tile", "rank"])
@pytest.mark.parametrize("symbol", [HEADS, WORK_ID, HEAD_CHUNK], ids=str)
def test_a_schedule_that_knows_the_heads_is_noticed(symbol: Expr, field: str) -> None:
    s = define("bent_fold", Band(0))
    broken = replace(s, **{field: getattr(s, field) + Rem(symbol, 2)})
    assert forbidden(broken) == {field: {symbol}}
    hidden = replace(s, visible=replace(s.visible, q=replace(s.visible.q, end=s.visible.q.end + Rem(symbol, 2))))
    assert forbidden(hidden) == {"visible": {symbol}}


def test_functions_of_tile_schedules_and_ranks_take_no_heads() -> None:
    named = {"head", "heads", "batch", "work_id", "HEAD_CHUNK"}
    assert not named & set(TILE_SCHEDULE)
    assert [name for name, parameters in SIGNATURES.items() if named & set(parameters)] == ["dash_launch"]


DTYPES = ("bfloat16", "float16", "float32")
MASKS = [
    "full", "causal", "causal:bottom_right", "band(0,1023)", "band(-64,64)", "keys(0)", "causal & keys(0)",
    "causal & segments(0,0)", "dense(0)", "causal & dense(0)",
]  # fmt: skip
COUNTS = [(heads, 1) for heads in range(1, 65)] + [(heads, group) for heads in (1, 2, 4, 8) for group in range(2, 9)]
"""kv heads, and query heads for each of them."""


def facts(mask: str, dims: tuple[int, int], dtype: str, arch: str, kv_heads: int = 1, group: int = 1) -> Site:
    spec = AttentionSpec(Mask.parse(mask), 0.125)
    device = "cpu" if arch == "cpu" else "cuda"
    return Site(device, dtype, 2, kv_heads * group, kv_heads, 4096, 4096, *dims, spec)  # type: ignore[arg-type]


def deciding(site: Site, arch: str) -> tuple[object, ...]:
    """All that a plan says of how gradients are computed, the numerics key without the size of a group."""
    p = plan(site, arch)
    assert f"/group{site.group}/" in p.numerics_key
    key = re.sub(r"/group\d+/", "/", p.numerics_key)
    tiles = p.dkdv, p.dq, p.forward_tiles
    return p.kernel, p.schedule, p.forward, tiles, p.tf32, p.critical_path, key


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arch", [*WORKERS, *SAME_AS])
def test_plans_do_not_know_how_many_heads_there_are(arch: str, dtype: str) -> None:
    """1 to 64 heads, and groups of 1 to 8; head chunks alone differ, which change no bit."""
    dims = [(64, 64), (128, 128)] + [(192, 128), (256, 256)] * (arch == "sm_90" and dtype != "float32")
    for mask, each in itertools.product(MASKS, dims):
        expected = deciding(facts(mask, each, dtype, arch), arch)
        for kv_heads, group in COUNTS:
            assert deciding(facts(mask, each, dtype, arch, kv_heads, group), arch) == expected, (mask, kv_heads, group)


def test_other_facts_of_a_site_are_noticed() -> None:
    """Negative control."""
    base = facts("causal", (128, 128), "bfloat16", "sm_90")
    others = [
        facts("band(0,1023)", (128, 128), "bfloat16", "sm_90"), facts("causal", (64, 64), "bfloat16", "sm_90"),
        facts("causal", (128, 128), "float16", "sm_90"), replace(base, spec=replace(base.spec, bias=Bias(Operand(0)))),
    ]  # fmt: skip
    assert all(deciding(other, "sm_90") != deciding(base, "sm_90") for other in others)
