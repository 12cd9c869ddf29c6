"""A gradient of the log-sum-exp, by the operators on the CPU, against autograd in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dash_inductor.errors import ArgumentError
from dash_inductor.model import AttentionSpec, Band, Bias, Dropout, Keys, Mask, Operand, Site
from dash_inductor.operators.attention import attention_backward, attention_forward
from dash_inductor.planning import planner

BATCH, Q_HEADS, KV_HEADS, Q_LEN, KV_LEN, DIM = 2, 4, 2, 70, 90, 16
ORDER = (0, 1, 2, 3)
Q, KV = torch.arange(Q_LEN)[:, None], torch.arange(KV_LEN)[None]


def exact(
    tensors: Sequence[Tensor], spec: AttentionSpec, shown: Tensor, bias: Tensor | None, grad_lse: Tensor, out_too: bool
) -> list[Tensor]:
    """dq, dk, dv and dbias in fp64; shown: bool that broadcasts to the scores."""
    q, k, v, do = (t.double() for t in tensors)
    leaves = [q, k, v, *([] if bias is None else [bias.double()])]
    for leaf in leaves:
        leaf.requires_grad_()
    k_, v_ = (t.repeat_interleave(Q_HEADS // KV_HEADS, 1) for t in leaves[1:3])
    s = q @ k_.mT * spec.scale
    s = s if spec.softcap is None else spec.softcap * torch.tanh(s / spec.softcap)
    s = s if bias is None else s + leaves[3]
    sees = shown.expand(s.shape).any(-1, keepdim=True)
    s = torch.where(shown | ~sees, s, float("-inf"))
    out = torch.where(sees, s.softmax(-1), 0.0) @ v_
    sums = torch.where(sees[..., 0], torch.logsumexp(s, -1), 0.0)
    return list(torch.autograd.grad((out, sums), leaves, (do if out_too else do * 0, grad_lse.double())))


CASES = {
    "full": (Mask(Band()), None),
    "causal": (Mask(Band(0, None)), None),
    "window": (Mask(Band(-3, 9, "bottom_right")), None),
    "rows without keys": (Mask(Band(30, 60)), None),
    "softcap": (Mask(Band(0, None)), 2.0),
    "keys": (Mask(Band(0, None), keys=Keys(Operand(0))), None),
}


@pytest.mark.parametrize("out_too", [False, True])
@pytest.mark.parametrize("schedule", [None, "spt"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", list(CASES))
def test_gradients(name: str, with_bias: bool, schedule: str | None, out_too: bool) -> None:
    """Alone, and with the output's.  The gradient has strides of its own."""
    mask, softcap = CASES[name]
    generator = torch.Generator().manual_seed(0)
    sizes = ((Q_HEADS, Q_LEN), (KV_HEADS, KV_LEN), (KV_HEADS, KV_LEN), (Q_HEADS, Q_LEN))
    tensors = [torch.randn(BATCH, heads, length, DIM, generator=generator) for heads, length in sizes]
    valid = torch.rand(BATCH, KV_LEN, generator=generator) < 0.3
    valid[1, :40] = False
    bias = torch.randn(BATCH, Q_HEADS, Q_LEN, KV_LEN, generator=generator) if with_bias else None
    grad_lse = torch.randn(BATCH, Q_LEN, Q_HEADS, generator=generator).transpose(1, 2)
    extras = [*([valid] if mask.keys is not None else []), *([] if bias is None else [bias])]
    spec = AttentionSpec(mask, DIM**-0.5, softcap=softcap)
    if bias is not None:
        spec = replace(spec, bias=Bias(Operand(len(extras) - 1), True))
    spec = replace(spec, grad_logsumexp=Operand(len(extras)))
    assert AttentionSpec.parse(str(replace(spec, orders=(ORDER,) * 3))) == replace(spec, orders=(ORDER,) * 3)
    site = Site("cpu", "float32", BATCH, Q_HEADS, KV_HEADS, Q_LEN, KV_LEN, DIM, DIM, spec)
    plan = str(planner.plan(site, "cpu", schedule))
    q, k, v, do = tensors
    out, lse = attention_forward(q, k, v, extras, str(replace(spec.of_forward, orders=(ORDER,))), plan, "site")
    given = (do if out_too else do * 0, q, k, v, out, lse, [*extras, grad_lse], str(replace(spec, orders=(ORDER,) * 3)))
    found = attention_backward(*given, plan, "site")
    band = mask.band.resolve(Q_LEN, KV_LEN)
    shown = (band.lo is None or band.lo <= Q - KV) & (torch.tensor(band.hi is None) | ((band.hi or 0) >= Q - KV))
    shown = shown & (valid[:, None, None] if mask.keys is not None else True)
    true = exact(tensors, spec, shown.expand(BATCH, Q_HEADS, Q_LEN, KV_LEN), bias, grad_lse, out_too)
    for ours, theirs in zip(found, true, strict=True):
        assert (ours - theirs).abs().max() < 1e-4


def test_text() -> None:
    """Texts without one are what they were; it stands in front of the orders, and its operand is the last one."""
    plain = "causal & keys(0)/scale=0.125/softcap=3.0/bias=1+gradient/dropout=0.5,2/orders=0123,0123,0123"
    spec = AttentionSpec.parse(plain)
    assert (str(spec), spec.grad_logsumexp, spec.of_forward) == (plain, None, spec)
    found = replace(spec, grad_logsumexp=Operand(3))
    assert str(found) == plain.replace("/orders", "/grad_logsumexp=3/orders")
    assert AttentionSpec.parse(str(found)) == found
    assert [operand.index for operand in found.operands] == [0, 1, 2, 3]
    assert found.of_forward == spec
    assert str(found.traits).endswith("_softcap_low_grad_logsumexp")
    assert "grad" not in str(spec.traits)
    with pytest.raises(ArgumentError):
        AttentionSpec.parse("causal/scale=0.125/orders=0123/grad_logsumexp=3")
    dropped = AttentionSpec(Mask(), 0.125, dropout=Dropout(0.5, Operand(0)), grad_logsumexp=Operand(1))
    assert AttentionSpec.parse(str(dropped)) == dropped
