"""Sinks in the forward of both families on a GPU: values, bits, and sinks that weigh nothing or everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dash_inductor.errors import ArgumentError
from dash_inductor.model import Band, Operand

from ..support import hopper_calls
from ..support.attention import Attention
from ..support.calls import BSHD, backward_spec, forward_spec
from ..support.hopper import MARKS, plan_of
from ..support.hopper_forward import Forward, rounding_of_sums
from ..support.repeats import differing_runs

pytestmark = MARKS

DIMS = [(64, 64), (128, 128), (192, 128), (256, 256)]
MASKS = [Band(), Band(0), Band(0, 99), Band(30, 500)]
Q_LEN, KV_LEN, BATCH, KV_HEADS, GROUP = 515, 387, 2, 2, 2
SIZES = {"heads": (1, KV_HEADS * GROUP, 1), "rows": (BATCH, KV_HEADS * GROUP, Q_LEN), "one": (1, 1, 1)}
ON = pytest.mark.parametrize(("head_dim", "value_dim"), DIMS)


def problem(band: Band, head_dim: int, value_dim: int) -> Attention:
    sizes = {"batch": BATCH, "kv_heads": KV_HEADS, "group": GROUP, "dtype": torch.bfloat16, "device": "cuda"}
    return Attention.random(Q_LEN, KV_LEN, head_dim, band, value_dim=value_dim, **sizes)


def sinks_of(size: tuple[int, int, int]) -> Tensor:
    return 4 * torch.randn(size, generator=torch.Generator().manual_seed(3)).cuda()


def forward(p: Attention, sinks: Tensor | None) -> Forward:
    spec = forward_spec(p.mask, p.scale)
    if sinks is None:
        return hopper_calls.forward(p.q, p.k, p.v, spec)
    return hopper_calls.forward(p.q, p.k, p.v, replace(spec, sinks=Operand(0)), sinks=sinks)


def exact(p: Attention, sinks: Tensor) -> Forward:
    k, v = (t.double().repeat_interleave(GROUP, 1) for t in (p.k, p.v))
    s = (p.q.double() @ k.mT * p.scale).masked_fill(~p.keep(), -torch.inf)
    s = torch.cat([s, sinks.double().expand(s.shape[:3])[..., None]], 3)
    return s.softmax(3)[..., :-1] @ v, s.logsumexp(3)


@ON
@pytest.mark.parametrize("band", MASKS, ids=str)
def test_values_and_bits(band: Band, head_dim: int, value_dim: int) -> None:
    p = problem(band, head_dim, value_dim)
    for size in SIZES.values():
        sinks = sinks_of(size)
        out, lse = forward(p, sinks)
        right, sums = exact(p, sinks)
        atol = 1e-4 + rounding_of_sums(p.q.dtype, (head_dim, value_dim))
        torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=atol)
        assert (out - right).abs().max() <= 4 * torch.finfo(out.dtype).eps * max(1.0, float(right.abs().max()))
    run: Callable[[], Forward] = lambda: forward(p, sinks)  # noqa: E731
    assert not differing_runs(run, 50)


@ON
def test_what_sinks_weigh(head_dim: int, value_dim: int) -> None:
    """Minus infinity has the bits of no sink; a sink above all scores leaves nothing, even of rows without keys."""
    p = problem(Band(30, 500), head_dim, value_dim)
    plain = forward(p, None)
    nothing = torch.full((1, 1, 1), -torch.inf, device="cuda")
    assert all(map(torch.equal, forward(p, nothing), plain))
    out, lse = forward(p, torch.full((1, 1, 1), 3e4, device="cuda"))
    assert (out == 0).all()
    torch.testing.assert_close(lse, torch.full_like(lse, 3e4), rtol=1e-6, atol=0)
    # a head's bits are its own, whatever the others' sinks are
    sinks = sinks_of(SIZES["heads"])
    other = sinks.clone()
    other[:, 1:] += 1
    assert all(torch.equal(a[:, :1], b[:, :1]) for a, b in zip(forward(p, sinks), forward(p, other), strict=True))
    assert not torch.equal(forward(p, sinks)[0], forward(p, other)[0])


@ON
@pytest.mark.parametrize("q_len", [512, 515])
def test_delta(q_len: int, head_dim: int, value_dim: int) -> None:
    """It is the sum of products of rows, and the gradients beside it have the bits of those alone."""
    p = Attention.random(q_len, q_len, head_dim, Band(0), group=2, value_dim=value_dim)
    out, lse = hopper_calls.forward(p.q, p.k, p.v, forward_spec(p.mask, p.scale))
    given = (p.do, p.q, p.k, p.v, out, lse, backward_spec(p.mask, p.scale, (BSHD,) * 3), plan_of(p, "spt"))
    alone = hopper_calls.backward(*given)
    with_delta = *given[:6], replace(given[6], delta=True), given[7]
    *gradients, delta = hopper_calls.backward(*with_delta)
    assert all(map(torch.equal, gradients, alone))
    right = (out.double() * p.do.double()).sum(3)
    torch.testing.assert_close(delta.double(), right, rtol=1e-5, atol=1e-4)
    assert not differing_runs(lambda: [hopper_calls.backward(*with_delta)[3]], 50)


def test_what_is_refused() -> None:
    p = problem(Band(0), 64, 64)
    for wrong in (sinks_of(SIZES["rows"])[:, :, 1:], sinks_of((1, 1, 1)).half(), sinks_of((1, 1, 1)).cpu()):
        with pytest.raises(ArgumentError, match="sinks"):
            forward(p, wrong)
