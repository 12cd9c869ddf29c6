"""Finite values in masks that are added: the least number of the type hides, every other one is added as it is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor.config import config
from dash_inductor.model.mask import Band
from dash_inductor.records.records import sites

from ..support.graphs import capture, step, tensors
from ..support.mask_graphs import read_as, read_mask
from .test_recognition import columns, rows

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
LEAST = {dtype: torch.finfo(dtype).min for dtype in (HALF, BRAIN, SINGLE)}
CASES: list[tuple[torch.dtype, float, bool]] = [
    *((dtype, -math.inf, True) for dtype in LEAST),
    *((dtype, LEAST[dtype], True) for dtype in LEAST),
    *((dtype, LEAST[dtype] / 2, False) for dtype in LEAST),
    *((dtype, -1e4, False) for dtype in LEAST),
    (HALF, -65472.0, False),  # the number above the least one
    (BRAIN, float(torch.tensor(LEAST[BRAIN], dtype=BRAIN) * 0.99), False),
    (BRAIN, -1e9, False),
    (SINGLE, LEAST[BRAIN], True),  # a mask of bfloat16 that was cast
    (SINGLE, LEAST[BRAIN] * 0.999, False),
    (SINGLE, LEAST[HALF], False),
    (SINGLE, -1e9, False),
    (SINGLE, -1e38, False),
]


def causal(q: Tensor, k: Tensor, low: float, dtype: torch.dtype) -> Tensor:
    zero = torch.zeros((), dtype=dtype)
    return torch.where(columns(k) <= rows(q), zero, torch.full((), low, dtype=dtype))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("dtype", "low", "hides"), CASES)
def test_what_hides(dtype: torch.dtype, low: float, hides: bool, dynamic: bool) -> None:
    found = read_mask(lambda q, k: causal(q, k, low, dtype), dynamic=dynamic)
    if hides:
        assert found == read_as(Band(0, None))
    else:
        assert (found.components, found.reason) == (None, "not_a_band")
        assert "least number" in found.detail


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_mask_that_is_cast_has_the_least_number_of_what_it_is_cast_to(dynamic: bool) -> None:
    """As autocast casts it: the least number of float32 is minus infinity in the half types."""

    def read(made: torch.dtype, used: torch.dtype) -> Band | None:
        return read_mask(lambda q, k: causal(q, k, LEAST[made], made).to(used), dynamic=dynamic).band

    assert read(SINGLE, HALF) == read(SINGLE, BRAIN) == read(BRAIN, SINGLE) == read(BRAIN, HALF) == Band(0, None)
    assert read(HALF, SINGLE) is read(HALF, BRAIN) is None


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(("dtype", "low", "hides"), [case for case in CASES if case[0] is not BRAIN])
def test_large_scores_outweigh_what_does_not_hide(dtype: torch.dtype, low: float, hides: bool) -> None:
    """Scores near 1e5, beside a mask value of half the least number of float16: the attention is nearly all theirs."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal(q, k, low, dtype))

    q, k, v = tensors(*[(1, 2, 40, 64)] * 3)
    inputs: list[Any] = [t.detach().to(dtype).requires_grad_() for t in (q * 300, k * 300, v)]
    with capture() as graphs, config.patch(strict=True):
        (out, *_) = step(graphs.compile(function), inputs)
    assert [record.mask for record in sites()] == ["causal" if hides else "full + bias"]
    true_q, true_k, true_v = (t.detach().double() for t in inputs)
    scores = true_q @ true_k.mT * 0.125
    assert scores.abs().max() > 1e5
    mask = causal(q, k, -math.inf if hides else low, dtype).double()
    expected = (scores + mask).softmax(-1) @ true_v
    assert (out.double() - expected).abs().max() < 0.05
