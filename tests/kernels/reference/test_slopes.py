"""The reference executors with ALiBi slopes, by the operators, against autograd in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dash_inductor.errors import ArgumentError
from dash_inductor.kernels.families import family
from dash_inductor.model import AttentionSpec, Band, Bias, Mask, Operand, Site
from dash_inductor.model.operands import OPERANDS
from dash_inductor.operators.attention import attention_backward, attention_forward
from dash_inductor.planning import planner
from dash_inductor.planning.numerics import components

from ...support.slopes import bias_of, exact

BATCH, Q_HEADS, KV_HEADS, DIM = 2, 4, 2, 16
ORDER = (0, 1, 2, 3)
BANDS = [Band(), Band(0, None, "bottom_right"), Band(0, 9, "bottom_right"), Band(-5, 7)]


def problem(dtype: torch.dtype, q_len: int, kv_len: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(Q_HEADS, q_len), (KV_HEADS, kv_len), (KV_HEADS, kv_len), (Q_HEADS, q_len)]
    return [torch.randn(BATCH, heads, length, DIM, generator=generator).to(dtype) for heads, length in sizes]


def computed(tensors: list[torch.Tensor], extras: list[torch.Tensor], spec: AttentionSpec) -> list[torch.Tensor]:
    q, k, v, do = tensors
    dtype = str(q.dtype).removeprefix("torch.")
    site = Site("cpu", dtype, BATCH, Q_HEADS, KV_HEADS, q.shape[2], k.shape[2], DIM, DIM, spec)  # type: ignore[arg-type]
    plan = str(planner.plan(site, "cpu"))
    out, lse = attention_forward(q, k, v, extras, str(replace(spec, orders=(ORDER,))), plan, "site")
    text = str(replace(spec, orders=(ORDER,) * 3))
    return [out, *attention_backward(do, q, k, v, out, lse, extras, text, plan, "site")]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("lengths", [(33, 33), (33, 50), (50, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_against_fp64(dtype: torch.dtype, lengths: tuple[int, int], softcap: float | None) -> None:
    tensors = problem(dtype, *lengths)
    for band in BANDS:
        for size in ((1, Q_HEADS), (BATCH, Q_HEADS), (1, 1)):
            slopes = torch.rand(size, generator=torch.Generator().manual_seed(1))
            spec = AttentionSpec(Mask(band), DIM**-0.5, slopes=Operand(0), softcap=softcap)
            found = computed(tensors, [slopes], spec)
            right = exact(tensors, slopes.expand(-1, Q_HEADS), band, DIM**-0.5, softcap)
            for ours, true in zip(found, right, strict=True):
                assert (ours - true).abs().max() < (1e-5 if dtype is torch.float32 else 4e-2)


def test_beside_a_bias() -> None:
    """The sum of both is added, as a bias of that sum is, with the same bits."""
    tensors, slopes = problem(torch.float32, 33, 50), torch.rand(1, Q_HEADS)
    bias = torch.randn(BATCH, Q_HEADS, 33, 50)
    spec = AttentionSpec(Mask(Band(0)), DIM**-0.5, bias=Bias(Operand(0)))
    both = computed(tensors, [bias, slopes], replace(spec, slopes=Operand(1)))
    assert all(map(torch.equal, both, computed(tensors, [bias + bias_of(slopes, 33, 50)], spec)))


def test_texts() -> None:
    spec = AttentionSpec(Mask(Band(0)), 0.5, bias=Bias(Operand(0)), slopes=Operand(1), sinks=Operand(2))
    assert str(spec) == "causal/scale=0.5/bias=0/slopes=1/sinks=2"
    assert AttentionSpec.parse(str(spec)) == spec
    assert str(spec.traits) == "lo_bias_slopes_sinks"
    assert spec.traits.biased
    assert len({spec, replace(spec, slopes=None), replace(spec, slopes=Operand(3))}) == 3
    site = Site("cuda", "bfloat16", 2, 4, 4, 64, 64, 64, 64, spec)
    assert components(site) == "causal + bias + slopes + sinks"
    assert family("hopper").lacks(AttentionSpec(Mask(), 0.5, slopes=Operand(0)).traits) == ["read slopes"]
    assert not family("portable").lacks(spec.traits)
    with pytest.raises(ArgumentError, match="reads number 1"):
        computed(problem(torch.float32, 9, 9), [torch.zeros(1, 1, 9, 9)], replace(spec, sinks=None))


def test_operands_of_both_sides_are_numbered_first() -> None:
    """Extras of a forward begin with what its backward reads too."""
    sides = [kind.side for kind in OPERANDS.values()]
    assert sides == sorted(sides, key=lambda side: side != "both")
