"""The reference under intervals of keys and bounded scores, by the operators, against autograd in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dash_inductor.kernels.common import relations
from dash_inductor.kernels.common.mask_data import MaskData
from dash_inductor.kernels.reference import tables
from dash_inductor.model import AttentionSpec, Band, Bias, HeadInterval, Interval, Mask, Operand, Segments, Site
from dash_inductor.operators.attention import attention_backward, attention_forward
from dash_inductor.planning import planner

from ...support.table_words import values_of

BATCH, Q_HEADS, KV_HEADS, LENGTH, DIM = 2, 4, 2, 90, 16
ORDER = (0, 1, 2, 3)


def vectors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    lo = torch.randint(-3, LENGTH, (BATCH, LENGTH), generator=generator)
    few = torch.randint(0, 9, (BATCH, LENGTH), generator=generator)
    return {"lo": lo, "hi": lo + torch.randint(-3, 40, lo.shape, generator=generator), "few": few}


def exact(tensors: Sequence[Tensor], shown: Tensor, softcap: float | None, bias: Tensor | None) -> list[Tensor]:
    """Output and gradients in fp64; shown: bool [BATCH, 1, LENGTH, LENGTH]."""
    q, k, v, do = (t.double() for t in tensors)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    k_, v_ = (t.repeat_interleave(Q_HEADS // KV_HEADS, 1) for t in leaves[1:])
    s = q @ k_.mT * DIM**-0.5
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    s = s if bias is None else s + bias.double()
    p = torch.where(shown, s, float("-inf")).softmax(-1)
    out = torch.where(shown.any(-1, keepdim=True), p, 0.0) @ v_
    return [out.detach(), *torch.autograd.grad(out, leaves, do)]


def computed(tensors: Sequence[Tensor], extras: list[Tensor], spec: AttentionSpec) -> list[Tensor]:
    q, k, v, do = tensors
    site = Site("cpu", "float32", BATCH, Q_HEADS, KV_HEADS, LENGTH, LENGTH, DIM, DIM, spec)
    plan = str(planner.plan(site, "cpu"))
    out, lse = attention_forward(q, k, v, extras, str(replace(spec, orders=(ORDER,))), plan, "site")
    text = str(replace(spec, orders=(ORDER,) * 3))
    return [out, *attention_backward(do, q, k, v, out, lse, extras, text, plan, "site")]


def check(spec: AttentionSpec, extras: list[Tensor], shown: Tensor, bias: Tensor | None = None) -> None:
    torch.manual_seed(0)
    sizes = (Q_HEADS, KV_HEADS, KV_HEADS, Q_HEADS)
    tensors = [1.5 * torch.randn(BATCH, heads, LENGTH, DIM) for heads in sizes]
    assert AttentionSpec.parse(str(spec)) == spec
    for ours, true in zip(computed(tensors, extras, spec), exact(tensors, shown, spec.softcap, bias), strict=True):
        assert (ours - true).abs().max() < 2e-4


Q, KV = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]


@pytest.mark.parametrize(
    ("lo", "hi", "number"),
    [("lo", None, None), (None, "hi", None), ("lo", "hi", None), (None, "few", "few"), ("few", None, "few")],
)
@pytest.mark.parametrize("band", [Band(), Band(0), Band(-20, 40)], ids=str)
def test_intervals(band: Band, lo: str | None, hi: str | None, number: str | None) -> None:
    found = vectors()
    names = list(dict.fromkeys(name for name in (lo, hi, number) if name))
    of = {None: None} | {name: Operand(i) for i, name in enumerate(names)}
    shown = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)
    numbers = KV if number is None else found[number][:, None, None]
    shown = shown & (lo is None or found[lo or ""][:, None, :, None] <= numbers)
    shown = shown & (hi is None or numbers <= found[hi or ""][:, None, :, None])
    shown = shown & (band.lo is None or band.lo <= Q - KV) & (band.hi is None or band.hi >= Q - KV)
    mask = Mask(band, interval=Interval(of[lo], of[hi], of[number]))
    check(AttentionSpec(mask, DIM**-0.5), [found[name] for name in names], shown)


def test_an_interval_beside_segments() -> None:
    found = vectors()
    ids = (KV // 20).expand(BATCH, -1)
    mask = Mask(segments=Segments(Operand(0), Operand(0)), interval=Interval(Operand(1), None))
    shown = (ids[:, None, :, None] == ids[:, None, None]) & (found["lo"][:, None, :, None] <= KV)
    check(AttentionSpec(mask, DIM**-0.5), [ids, found["lo"]], shown)


@pytest.mark.parametrize("sides", ["lo", "hi", "lo hi"])
def test_intervals_by_head(sides: str) -> None:
    generator = torch.Generator().manual_seed(0)
    lo = torch.randint(-3, LENGTH, (BATCH, Q_HEADS, LENGTH, 1), generator=generator)
    hi = torch.randint(9, LENGTH, (1, Q_HEADS, 1, 1), generator=generator)
    of = {name: Operand(i) for i, name in enumerate(sides.split())}
    mask = Mask(Band(0), HeadInterval(of.get("lo"), of.get("hi")))
    shown = (Q >= KV) & ("lo" not in of or lo <= KV) & ("hi" not in of or hi >= KV)
    check(AttentionSpec(mask, DIM**-0.5), [{"lo": lo, "hi": hi}[name] for name in of], shown)


@pytest.mark.parametrize("softcap", [0.5, 3.0, 50.0])
@pytest.mark.parametrize("has_bias", [False, True])
def test_bounded_scores(softcap: float, has_bias: bool) -> None:
    bias = torch.randn(BATCH, Q_HEADS, LENGTH, LENGTH) if has_bias else None
    spec = AttentionSpec(Mask(Band(0)), DIM**-0.5, bias=Bias(Operand(0)) if has_bias else None, softcap=softcap)
    shown = (Q >= KV).expand(BATCH, 1, -1, -1)
    check(spec, [] if bias is None else [bias], shown, bias)


@pytest.mark.parametrize("band", [Band(), Band(0), Band(-20, 40, "bottom_right")], ids=str)
@pytest.mark.parametrize(("q_len", "kv_len"), [(33, 70), (70, 33), (1, 40)])
def test_other_lengths_of_keys(band: Band, q_len: int, kv_len: int) -> None:
    """Bounds of queries beside numbers of keys of another length, by the reader of tables and by the definition."""
    generator = torch.Generator().manual_seed(0)
    lo = torch.randint(-3, kv_len, (BATCH, q_len), generator=generator)
    hi, number = lo + 9, torch.randint(0, kv_len, (BATCH, kv_len), generator=generator)
    distance = torch.arange(q_len)[:, None] - torch.arange(kv_len)[None]
    resolved = band.resolve(q_len, kv_len)
    inside = torch.ones(q_len, kv_len, dtype=torch.bool)
    inside = inside & (resolved.lo is None or distance >= resolved.lo)
    inside = inside & (resolved.hi is None or distance <= resolved.hi)
    for numbers in (None, number):
        data = MaskData(band, BATCH, 1, 1, q_len, kv_len, values_of(interval=(lo, hi, numbers)))
        of_keys = torch.arange(kv_len).expand(BATCH, -1) if numbers is None else number
        shown = inside & (lo[:, :, None] <= of_keys[:, None]) & (of_keys[:, None] <= hi[:, :, None])
        assert torch.equal(tables._shown(data)[:, 0], shown)
        (of,) = relations.vectors(data)
        kv_ranges, ranks = of.form.vectors(of, data)
        keys = torch.arange(kv_len).expand(BATCH, -1) if numbers is None else ranks[:, 0]
        found = (kv_ranges[:, 0, :, None] <= keys[:, None]) & (keys[:, None] < kv_ranges[:, 1, :, None])
        assert torch.equal(found if numbers is None else found & inside, shown)
