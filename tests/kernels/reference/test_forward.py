"""The executor of the portable forward, and the backward's with a vector of valid keys, against fp64 on the CPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from dash_inductor.errors import ArgumentError
from dash_inductor.kernels.portable import templates
from dash_inductor.kernels.reference import backward as reference
from dash_inductor.kernels.reference import forward as reference_forward
from dash_inductor.model import AttentionSpec, Band, Mask, Plan, Tiles
from dash_inductor.operators import attention as ops

from ...support.attention import errors
from ...support.keyed import KeyedAttention
from ...support.poison import single_pass

MASKS = [Band(), Band(0), Band(0, None, "bottom_right"), Band(-9, 9), Band(None, -5), Band(10, 25), Band(500, 600)]
VALID = ["all", "holes", "padded", "left", "nobody"]
TILES = Tiles(32, 16, 1, 1)
# fp32 against fp64: sums of at most 70 products of magnitude 1 to 10 lose a few units in the last place
TOLERANCE = 2e-5


def executed(p: KeyedAttention) -> tuple[torch.Tensor, torch.Tensor]:
    return reference_forward.forward(p.q, p.k, p.v, p.extras, p.spec(1), TILES)


def executed_backward(p: KeyedAttention, schedule: str, fill: float = 0.0) -> tuple[torch.Tensor, ...]:
    """`fill` stands in out and log-sum-exp of rows that see no key."""
    plan = Plan("reference", schedule, "reference", TILES, TILES if schedule == "two_pass" else None)
    rows = p.keep().any(2)[:, None]
    out, lse, _ = replace(p, **{name: torch.nan_to_num(getattr(p, name)) for name in ("q", "k", "v", "do")}).exact()
    out, lse = torch.where(rows[..., None], out, fill), torch.where(rows, lse, fill)
    tensors = p.do, p.q, p.k, p.v, out.to(p.q.dtype), lse.float()
    return reference.backward(*tensors, p.extras, p.spec(3), plan)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 40])
def test_a_row_has_the_same_bits_whatever_the_lengths(window: int | None, softcap: float | None) -> None:
    """In a forward over a prefix, among the last queries, and alone."""
    q, k, v = torch.randn(1, 4, 150, 24), torch.randn(1, 2, 150, 24), torch.randn(1, 2, 150, 16)
    spec = AttentionSpec(Mask(Band(0, window, "bottom_right")), 0.3, softcap=softcap)

    def rows(length: int, count: int) -> list[torch.Tensor]:
        given = q[:, :, length - count : length], k[:, :, :length], v[:, :, :length]
        return [t[:, :, -1] for t in reference_forward.forward(*given, (), spec, TILES)]

    whole = reference_forward.forward(q, k, v, (), spec, TILES)
    for length in (1, 2, 15, 16, 17, 31, 33, 64, 101, 149, 150):
        expected = [t[:, :, length - 1] for t in whole]
        for count in {1, min(5, length), length}:
            assert all(map(torch.equal, rows(length, count), expected)), (length, count)


@pytest.mark.parametrize("valid", VALID)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("q_len", "kv_len"), [(33, 70), (70, 33), (1, 40), (40, 1)])
def test_against_fp64(mask: Band, q_len: int, kv_len: int, valid: str) -> None:
    for scale, dims in ((0.3, (16, 24)), (-0.5, (24, 8)), (0.0, (8, 16))):
        p = KeyedAttention.random(q_len, kv_len, mask, group=2, kv_heads=1, valid=valid, scale=scale, dims=dims)
        out, lse, _ = p.exact()
        got, got_lse = executed(p)
        sees = p.keep().any(2)[:, None].expand_as(lse)
        assert (got - out).abs().max() < TOLERANCE
        torch.testing.assert_close(got_lse[sees].double(), lse[sees], atol=TOLERANCE, rtol=0)
        assert (got[~sees] == 0).all()
        assert (got_lse[~sees] == -math.inf).all()
        assert got.is_contiguous()


@pytest.mark.parametrize("valid", VALID[1:])
@pytest.mark.parametrize("one_pass", [False, True], ids=["two passes", "one pass"])
def test_gradients_with_keys(one_pass: bool, valid: str) -> None:
    for mask in MASKS:
        p = KeyedAttention.random(33, 45, mask, group=2, kv_heads=2, valid=valid)
        gradients = executed_backward(p, single_pass(mask) if one_pass else "two_pass")
        assert max(errors(gradients, p.exact()[2])) < TOLERANCE  # type: ignore[arg-type]  # three of them
        keep = p.keep()
        for gradient, looked_at in zip(gradients, (keep.any(2), keep.any(1), keep.any(1)), strict=True):
            assert (gradient.transpose(1, 2)[~looked_at] == 0).all()


def test_keys_of_ones_change_no_bit() -> None:
    p = KeyedAttention.random(33, 45, Band(0), group=2)
    with_keys = replace(p, keys=torch.ones(2, 45, dtype=torch.uint8))
    for plain, keyed in ((executed(p), executed(with_keys)),):
        assert all(map(torch.equal, plain, keyed))
    for schedule in ("two_pass", "spt"):
        assert all(map(torch.equal, executed_backward(p, schedule), executed_backward(with_keys, schedule)))


@pytest.mark.parametrize("valid", VALID)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_what_nobody_sees_may_hold_anything(mask: Band, valid: str) -> None:
    p = KeyedAttention.random(40, 33, mask, valid=valid).surrounded(0.0)
    expected, gradients = executed(p), executed_backward(p, "two_pass")
    for fill in (math.nan, math.inf, -math.inf):
        poisoned = p.surrounded(fill)
        assert all(map(torch.equal, expected, executed(poisoned))), fill
        assert all(map(torch.equal, gradients, executed_backward(poisoned, "two_pass", fill))), fill


def test_a_nan_that_somebody_sees_does_not_reach_those_who_see_nothing() -> None:
    p = KeyedAttention.random(40, 33, Band(0, 9), valid="left")
    assert p.keys is not None
    p = replace(p, **{name: getattr(p, name) * math.nan for name in ("q", "k", "v", "do")})
    rows = p.keep().any(2)
    out, lse = executed(p)
    dq, dk, dv = executed_backward(p, "two_pass")
    for tensor, looked_at in ((out, rows), (dq, rows), (dk, p.keys), (dv, p.keys)):
        assert tensor.isnan().any()
        assert (tensor.transpose(1, 2)[~looked_at] == 0).all()
    assert (lse.transpose(1, 2)[~rows] == -math.inf).all()


@pytest.mark.parametrize("valid", ["all", "holes"])
def test_the_bits_of_a_head_are_its_own(valid: str) -> None:
    p = KeyedAttention.random(70, 45, Band(-9, 20), batch=3, kv_heads=2, group=2, valid=valid)
    out, lse = executed(p)
    for b in range(3):
        for h in range(2):
            at, heads = slice(b, b + 1), slice(2 * h, 2 * h + 2)
            keys = None if p.keys is None else p.keys[at]
            alone = replace(p, q=p.q[at, heads], k=p.k[at, h : h + 1], v=p.v[at, h : h + 1], keys=keys)
            assert all(map(torch.equal, executed(alone), (out[at, heads], lse[at, heads])))


def test_the_order_of_tiles_changes_the_bits() -> None:
    """The executor really follows the tiles."""
    p = KeyedAttention.random(64, 200, Band())
    other = reference_forward.forward(p.q, p.k, p.v, [], p.spec(1), Tiles(32, 64, 1, 1))
    assert not torch.equal(executed(p)[0], other[0])


def test_the_operator_runs_the_executor() -> None:
    p = KeyedAttention.random(40, 70, Band(0), group=2, dims=(24, 40), valid="holes")
    for family in ("portable", "reference", "hopper"):
        plan = str(Plan("portable", "two_pass", family, TILES, TILES, forward_tiles=TILES))
        got, lse = ops.attention_forward(p.q, p.k, p.v, p.extras, str(p.spec(1)), plan, "test")
        expected = executed(p)
        assert torch.equal(got, expected[0])
        assert torch.equal(lse, expected[1])
        assert got.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("scale", [1.0, 0.125, 3.7, 1e-30, 1e38])
def test_slope(scale: float) -> None:
    for sign in (1.0, -1.0):
        found, slope = templates.signed_slope(sign * scale)
        assert found == sign
        assert slope == pytest.approx(scale * math.log2(math.e), rel=1e-7)
        assert slope == torch.tensor(slope, dtype=torch.float32).item()


@pytest.mark.parametrize("scale", [0.0, -0.0, 1e-60])
def test_a_scale_of_zero(scale: float) -> None:
    assert templates.signed_slope(scale) == (0.0, 1.0)


@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan, 3e38])
def test_a_scale_that_is_too_large(scale: float) -> None:
    with pytest.raises(ArgumentError, match="scale="):
        templates.signed_slope(scale)
