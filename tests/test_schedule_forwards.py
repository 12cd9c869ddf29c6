"""Which forward is planned where, and that it computes the mask for all lengths that the site's facts admit."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from dash_inductor.model.mask import Band
from dash_inductor.model.site import Site
from dash_inductor.planning.forwards import choose
from dash_inductor.planning.planner import plan
from tests.support.borrowed import flash_sees
from tests.support.calls import call_of

CAUSAL, BOTTOM = Band(0, None), Band(0, None, "bottom_right")
LOOK_AHEAD = Band(-50, 37, "bottom_right")


def site(q_len: int | None, dim: int, mask: Band, scale: float | None = None, **changes: object) -> Site:
    """A bfloat16 site on CUDA with equal lengths, with fields changed by name."""
    base = Site(
        "cuda", "bfloat16", 2, 8, 8, q_len, q_len, dim, dim, call_of(mask, dim**-0.5 if scale is None else scale)
    )
    return replace(base, **changes)  # type: ignore[arg-type]  # the names are Site's


TABLE = [
    (site(512, 64, Band()), "sm_90", "cudnn"),
    (site(512, 64, BOTTOM), "sm_90", "cudnn"),
    (site(512, 64, CAUSAL, kv_len=64), "sm_90", "cudnn"),
    (site(1, 64, Band(), kv_len=512), "sm_90", "flash"),
    (site(2, 64, Band(), kv_len=512), "sm_90", "cudnn"),
    (site(1, 64, CAUSAL, kv_len=512), "sm_90", "cudnn"),
    (site(None, 64, Band()), "sm_90", "flash"),
    (site(None, 64, Band(), least_q_len=2), "sm_90", "cudnn"),
    (site(512, 64, Band()), "sm_100", "flash"),
    (site(512, 64, CAUSAL), "sm_80", "flash"),
    (site(None, 64, CAUSAL), "sm_80", "keep"),
    (site(None, 64, CAUSAL, square=True), "sm_80", "flash"),
    (site(None, 64, BOTTOM), "sm_90", "flash"),
    (site(None, 64, LOOK_AHEAD), "sm_90", "keep"),
    (site(None, 64, LOOK_AHEAD, q_within_kv=True), "sm_90", "flash"),
    (site(799, 64, LOOK_AHEAD, kv_len=40), "sm_90", "keep"),
    (site(64, 64, Band(448, None), kv_len=512), "sm_90", "keep"),
    (site(64, 64, Band(-448, None), kv_len=512), "sm_90", "flash"),
    (site(512, 64, Band(None, 9, "bottom_right"), kv_len=64), "sm_90", "keep"),
    (site(64, 64, Band(None, 9, "bottom_right"), kv_len=512), "sm_90", "flash"),
    (site(512, 64, Band(5, None)), "sm_90", "keep"),
    (site(512, 64, Band(), dtype="float32"), "sm_90", "efficient"),
    (site(512, 64, Band(0, 9), dtype="float32"), "sm_90", "efficient"),
    (site(512, 64, Band(-9, 9), dtype="float32"), "sm_90", "keep"),
    (site(512, 64, Band(), dtype="float32", scale=-0.5), "sm_90", "efficient"),
    (site(512, 256, CAUSAL), "sm_90", "flash"),
    (site(512, 192, CAUSAL, value_dim=128), "sm_90", "keep"),
    (site(512, 64, CAUSAL, scale=-0.5), "sm_90", "keep"),
    (site(512, 64, CAUSAL, scale=0.0), "sm_90", "keep"),
    (site(512, 64, Band(), device="cpu"), "cpu", "cpu"),
    (site(512, 64, CAUSAL, device="cpu", kv_len=64), "cpu", "cpu"),
    (site(512, 64, BOTTOM, device="cpu", kv_len=64), "cpu", "reference"),
    (site(512, 64, CAUSAL, device="cpu", scale=-0.5), "cpu", "reference"),
    (site(512, 64, Band(), device="cpu", scale=0.0), "cpu", "reference"),
]


@pytest.mark.parametrize(("facts", "arch", "forward"), TABLE)
def test_table(facts: Site, arch: str, forward: str) -> None:
    chosen = choose(facts, arch)
    name, why = chosen.name, chosen.note
    assert name == forward
    assert (why != "") == (forward == "keep")
    assert plan(facts, arch).forward_note == why


BOUNDS = (None, -12, -7, -3, -1, 0, 1, 4, 8, 12)
BANDS = [
    Band(lo, hi, anchor)
    for lo, hi in product(BOUNDS, BOUNDS)
    if lo is None or hi is None or lo <= hi
    for anchor in ("top_left", "bottom_right")
]
LENGTHS = (1, 2, 3, 5, 6, 7, 9, 14)


def test_flash_is_planned_only_where_it_computes_the_mask() -> None:
    """For known lengths, and for lengths of which some facts are known: then for all lengths that have these facts."""
    planned = 0
    for band, q_len, kv_len in product(BANDS, LENGTHS, LENGTHS):
        facts = [site(q_len, 64, band.resolve(q_len, kv_len), kv_len=kv_len)]
        facts += [site(None, 64, band)]
        facts += [site(None, 64, band, square=True)] if q_len == kv_len else []
        facts += [site(None, 64, band, q_within_kv=True)] if q_len <= kv_len else []
        if not any(choose(f, "sm_80").name == "flash" for f in facts):
            continue
        planned += 1
        seen = flash_sees(band.resolve(q_len, kv_len), q_len, kv_len)
        pairs = product(range(q_len), range(kv_len))
        assert seen == {(i, j) for i, j in pairs if band.visible(i, j, q_len, kv_len)}, (band, q_len, kv_len)
    assert planned > 1000


def test_most_masks_that_flash_computes_are_planned() -> None:
    """For known lengths: what is ruled out although it would be right is look-ahead with few more queries than keys."""
    for band, q_len, kv_len in product(BANDS, LENGTHS, LENGTHS):
        resolved = band.resolve(q_len, kv_len)
        offset = kv_len - q_len
        diagonal = (resolved.lo is None or resolved.lo + offset <= 0) and (
            resolved.hi is None or resolved.hi + offset >= 0
        )
        if diagonal and q_len <= kv_len:
            assert choose(site(q_len, 64, resolved, kv_len=kv_len), "sm_80").name == "flash"
