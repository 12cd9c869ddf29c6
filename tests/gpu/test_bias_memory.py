"""The peak of memory of attention whose bias has a gradient and is shared: never above that of PyTorch's kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dash_inductor
from dash_inductor import sites
from dash_inductor.config import config

pytestmark = pytest.mark.gpu

BATCH, HEADS, LENGTH = 2, 8, 1024
CASES = [
    (64, (1, HEADS, LENGTH, LENGTH)),  # relative positions
    (64, (1, HEADS, 1, LENGTH)),
    (64, (BATCH, 1, LENGTH, LENGTH)),
    (256, (1, HEADS, LENGTH, LENGTH)),
]


def peak(dim: int, size: tuple[int, ...]) -> tuple[int, list[Tensor]]:
    """Bytes beyond what was there before a step of forward and backward, and the gradients."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    compiled = torch.compile(F.scaled_dot_product_attention, dynamic=False)
    q, k, v = (
        torch.randn(BATCH, HEADS, LENGTH, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    bias = torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights = torch.randn_like(q)
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = compiled(q, k, v, attn_mask=bias)
        gradients = torch.autograd.grad(out, (q, k, v, bias), weights)
        most = torch.cuda.max_memory_allocated() - before
        del out
    return most, [g.detach() for g in gradients]


@pytest.mark.parametrize(("dim", "size"), CASES)
def test_peak(dim: int, size: tuple[int, ...], deterministic: None) -> None:
    with config.patch(strict=True):
        ours, gradients = peak(dim, size)
        again = peak(dim, size)[1]
    assert {r.status for r in sites()} == {"replaced"}
    assert all(map(torch.equal, gradients, again))
    with dash_inductor.disabled():
        theirs, others = peak(dim, size)
    assert ours <= theirs, (ours, theirs)
    for a, b in zip(gradients, others, strict=True):
        assert (a.double() - b.double()).norm() <= 0.02 * b.double().norm()
