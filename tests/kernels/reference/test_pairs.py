"""The reference executors with a bias, and with dense masks and dropout beside it, against fp64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from dash_inductor.errors import ArgumentError
from dash_inductor.model import Band, Bias, Operand, Plan, Tiles
from dash_inductor.operators import attention as ops

from ...support.paired import PairedAttention

TILES = Tiles(32, 16, 1, 1)
BIASES = ["bhqk:random", "hqk:infinite", "bk:lowest", "qk:lowest", "hk:random", "bq:random", "1:random"]


def plan_of(schedule: str) -> str:
    return str(
        Plan("reference", schedule, "reference", TILES, TILES if schedule == "two_pass" else None, 1, False, TILES)
    )


def executed(p: PairedAttention, schedule: str = "two_pass") -> tuple[Tensor, tuple[Tensor, ...]]:
    """(out, gradients of q, k, v and the bias)."""
    plan, extras = plan_of(schedule), p.extras
    out, lse = ops.attention_forward(p.q, p.k, p.v, extras, str(p.spec(1)), plan, "test")
    arguments = (p.do, p.q, p.k, p.v, out, lse, extras, str(p.spec(3, gradient=True)), plan, "test")
    if p.bias is None:
        gradients: tuple[Tensor, ...] = ops.attention_backward(*arguments)
        return out, gradients
    *others, gradient = ops.attention_backward(*arguments)
    plain = *arguments[:7], str(p.spec(3)), *arguments[8:]
    assert all(map(torch.equal, others, ops.attention_backward(*plain)))
    assert gradient.dtype == p.bias.dtype
    assert [gradient.shape[d] for d in p.summed] == [1] * len(p.summed)
    return out, (*others, p.reduced(gradient))


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("schedule", ["two_pass", "ascending"])
def test_against_fp64(bias: str, schedule: str) -> None:
    for band, dense, keys in product((Band(), Band(0, None, "bottom_right")), ("none", "hqk"), (False, True)):
        p = PairedAttention.random(33, 45, band, dense=dense, bias=bias, keys=keys, group=2)
        out, gradients, sees = p.exact()
        got, ours = executed(p, schedule)
        torch.testing.assert_close(got.double(), out, atol=1e-5, rtol=1e-5)
        assert (got[~sees] == 0).all()
        for gradient, true in zip(ours, gradients, strict=True):
            torch.testing.assert_close(gradient.double(), true, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("dense", ["none", "hqk"])
@pytest.mark.parametrize("bias", ["none", *BIASES])
@pytest.mark.parametrize("schedule", ["two_pass", "ascending"])
def test_with_dropout_against_fp64(dense: str, bias: str, schedule: str) -> None:
    """The dropped pairs enter all four gradients; dropped pairs of other heads or batch elements would not do."""
    for drops, band, keys in ((0.1, Band(), False), (0.5, Band(0, None, "bottom_right"), True)):
        p = PairedAttention.random(33, 45, band, dense=dense, bias=bias, keys=keys, group=2, drops=drops)
        out, gradients, sees = p.exact()
        got, ours = executed(p, schedule)
        torch.testing.assert_close(got.double(), out, atol=1e-5, rtol=1e-5)
        assert (got[~sees] == 0).all()
        for gradient, true in zip(ours, gradients, strict=True):
            torch.testing.assert_close(gradient.double(), true, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("bias", ["hqk:random", "qk:infinite"])
@pytest.mark.parametrize("drops", [0.0, 0.3])
def test_what_nobody_sees_may_hold_anything(bias: str, drops: float) -> None:
    p = PairedAttention.random(33, 45, Band(0, 20), dense="bhqk", bias=bias, keys=True, group=2, drops=drops)
    out, expected = executed(p.surrounded(0.0))
    for fill in (float("nan"), float("inf")):
        got, gradients = executed(p.surrounded(fill))
        assert all(map(torch.equal, (out, *expected), (got, *gradients)))


def test_a_bias_of_zeros_is_none() -> None:
    plain = PairedAttention.random(33, 45, Band(0))
    p = PairedAttention(plain.q, plain.k, plain.v, plain.do, plain.band, plain.scale, bias=torch.zeros(1, 1, 1, 1))
    for got, expected in zip(executed(p)[1], executed(plain)[1], strict=False):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


def test_a_uniform_row_of_the_lowest_number_is_exact() -> None:
    """As PyTorch's math: the log-sum-exp of such a row is too large to hold the number of keys."""
    p = PairedAttention.random(9, 64, Band(), bias="qk:lowest")
    out, (dq, dk, dv, dbias) = executed(p)
    leaves = [t.clone().requires_grad_() for t in (p.q, p.k, p.v, p.bias)]  # type: ignore[union-attr]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = torch.nn.functional.scaled_dot_product_attention(*leaves[:3], attn_mask=leaves[3], scale=p.scale)
    torch.testing.assert_close(out, expected)
    for got, true in zip((dq, dk, dv, dbias.float()), torch.autograd.grad(expected, leaves, p.do), strict=True):
        torch.testing.assert_close(got, true, atol=1e-5, rtol=1e-4)


def test_the_bias_of_a_call_is_read_from_its_place() -> None:
    p = PairedAttention.random(9, 9, Band(), bias="qk:random")
    with pytest.raises(ArgumentError, match="reads number 0"):
        ops.attention_forward(p.q, p.k, p.v, [], str(p.spec(1)), plan_of("two_pass"), "test")


@pytest.mark.parametrize("summed", [[0, 0], [2], [-1]])
def test_other_dimensions_are_not_summed(summed: list[int]) -> None:
    with pytest.raises(ArgumentError, match="summed="):
        Bias(Operand(0), True, tuple(summed))
