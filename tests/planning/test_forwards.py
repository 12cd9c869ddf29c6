"""The planned forwards: one of our own at every site, whatever its lengths, mask and scale."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from dash_inductor.model.attention_spec import AttentionSpec
from dash_inductor.model.components import Keys, Operand
from dash_inductor.model.mask import Band, Mask
from dash_inductor.model.plan import Plan
from dash_inductor.model.site import Site
from dash_inductor.planning.planner import decide, keeping, plan

CAUSAL, BOTTOM, LOOK_AHEAD = Band(0), Band(0, None, "bottom_right"), Band(-50, 37, "bottom_right")
KEYS = Keys(Operand(0))


def site(dims: tuple[int, int], dtype: str = "bfloat16", mask: Mask = Mask(), device: str = "cuda") -> Site:  # noqa: B008
    return Site(device, dtype, 2, 8, 8, 512, 512, *dims, AttentionSpec(mask, 0.125))  # type: ignore[arg-type]  # names


TABLE = [
    ("sm_90", site((64, 64)), "hopper:192x128w12"),
    ("sm_90", site((8, 8), "float16"), "hopper:192x128w12"),
    ("sm_90", site((96, 96)), "hopper:128x128w8"),
    ("sm_90", site((192, 128), mask=Mask(CAUSAL)), "hopper:128x128w8"),
    ("sm_90", site((256, 256)), "hopper:128x64w8"),
    ("sm_90", site((64, 64), mask=Mask(CAUSAL, KEYS)), "hopper:192x128w12"),
    ("sm_90", site((8, 8), mask=Mask(CAUSAL, KEYS)), "portable:128x64w4"),  # as its backward
    ("sm_90", site((64, 64), "float32"), "portable:64x64w4"),
    ("sm_80", site((64, 64)), "portable:128x64w4"),
    ("sm_100", site((128, 128), "float16"), "portable:128x64w8"),
    ("cpu", site((64, 64), "float32", device="cpu"), "reference:64x64w1"),
    ("cpu", site((64, 64), "float32", Mask(CAUSAL, KEYS), "cpu"), "reference:64x64w1"),
]


@pytest.mark.parametrize(("arch", "facts", "forward"), TABLE)
def test_table(arch: str, facts: Site, forward: str) -> None:
    chosen = plan(facts, arch)
    assert chosen.numerics_key.endswith(f"/forward={forward}")
    name, _, shape = forward.partition(":")
    assert chosen.forward == name
    assert str(chosen.forward_tiles).startswith(shape)


@pytest.mark.parametrize(("arch", "facts", "forward"), TABLE)
def test_nothing_but_dims_dtype_and_components_decides(arch: str, facts: Site, forward: str) -> None:
    """In particular no length, known or not, no anchor, and no scale, all of which ruled other libraries' out."""
    for q_len, kv_len in product((1, 2, 799, None), (1, 40, 4096, None)):
        for band, scale in product((Band(), CAUSAL, BOTTOM, LOOK_AHEAD, Band(448)), (0.2, 0.0, -0.5)):
            spec = AttentionSpec(Mask(band, facts.mask.keys), scale)
            other = replace(facts, q_len=q_len, kv_len=kv_len, spec=spec, batch=None)
            found = plan(other, arch)
            if facts.mask.keys is None:
                assert found.numerics_key.endswith(f"/forward={forward}")
            else:  # the forward of a mask that is data is of the family of its backward
                assert found.forward == found.kernel


def test_every_site_that_is_planned_has_a_forward() -> None:
    """All head dims, architectures and dtypes: tiles are missing exactly where the forward is not replaced."""
    planned = 0
    for arch, dtype, dim, value_dim in product(
        ("sm_80", "sm_89", "sm_90", "sm_100"), ("bfloat16", "float32"), range(8, 528, 8), (8, 128, 256, 512)
    ):
        decision = decide(site((dim, value_dim), dtype), arch)
        if isinstance(decision, Plan):
            planned += 1
            assert decision.forward_tiles is not None
            assert keeping(decision, "op").forward_tiles is None
    assert planned > 30
