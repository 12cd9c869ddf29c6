"""Masks that differ between heads through torch.compile on a GPU: values, bits, and heads alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor import clear_sites, sites

from ..support.repeats import differing_runs
from .test_intervals import exact

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

SHAPES = [
    (2, 8, 2, 128, torch.bfloat16),
    (1, 8, 8, 64, torch.float16),
    (2, 4, 2, 256, torch.bfloat16),
    (1, 4, 2, 64, torch.float32),
]
"""Batch, heads of query and of key, head dim, dtype."""
LENGTH = 1000


def causal_windows(q: Tensor, kv: Tensor, width: Tensor, documents: Tensor) -> Tensor:
    return (q >= kv) & (q - kv < width)


def windows(q: Tensor, kv: Tensor, width: Tensor, documents: Tensor) -> Tensor:
    return (q - kv < width) & (kv - q < width)


def some_global(q: Tensor, kv: Tensor, width: Tensor, documents: Tensor) -> Tensor:
    return (q >= kv) & ((width > 300) | (q - kv < 100))


def in_documents(q: Tensor, kv: Tensor, width: Tensor, documents: Tensor) -> Tensor:
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return causal_windows(q, kv, width, documents) & same


Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
MASKS: dict[Mask, str] = {
    causal_windows: "causal & head_interval(0,none)",
    windows: "head_interval(0,1)",
    some_global: "causal & head_interval(0,none)",
    in_documents: "causal & segments(0,0) & head_interval(1,none)",
}


def shown(make: Mask, width: Tensor, documents: Tensor) -> Tensor:
    places = torch.arange(LENGTH, device=width.device)
    return make(places[:, None], places[None], width[None, :, None, None], documents)


def step(make: Mask) -> Callable[..., list[Tensor]]:
    torch._dynamo.reset()

    @torch.compile(dynamic=False)
    def attention(q: Tensor, k: Tensor, v: Tensor, width: Tensor, documents: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=shown(make, width, documents))

    def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor, width: Tensor, documents: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = attention(*leaves, width, documents)
        return [out.detach(), *torch.autograd.grad(out, leaves, do)]

    return run


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"d{shape[3]}-{shape[4]}".replace("torch.", ""))
@pytest.mark.parametrize("make", MASKS, ids=lambda make: make.__name__)
def test_head_intervals(make: Mask, shape: tuple[int, int, int, int, torch.dtype]) -> None:
    batch, q_heads, kv_heads, dim, dtype = shape
    torch.manual_seed(0)
    sizes = (q_heads, kv_heads, kv_heads, q_heads)
    tensors = [torch.randn(batch, heads, LENGTH, dim, device="cuda", dtype=dtype) for heads in sizes]
    width = torch.tensor([1, 700, 64, 5000, 200, 350, 129, 10][:q_heads], device="cuda")
    documents = (torch.arange(LENGTH, device="cuda") // 333).expand(batch, -1).contiguous()
    clear_sites()
    run = step(make)
    found = run(*tensors, width, documents)
    (site,) = sites()
    assert site.mask == MASKS[make], site
    on_hopper = torch.cuda.get_device_capability() == (9, 0) and dtype != torch.float32
    assert not on_hopper or str(site.plan).startswith("hopper"), site
    keep = shown(make, width, documents).expand(batch, q_heads, LENGTH, LENGTH)
    for ours, true in zip(found, exact(tensors, keep), strict=True):
        error = (ours.double() - true).norm() / true.norm()
        assert error < {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-4}[dtype]
    assert not differing_runs(lambda: run(*tensors, width, documents), 50)
    # The heads of one kv head alone, of one batch element, have the same bits.
    group = q_heads // kv_heads
    last = [t[-1:, -n:].contiguous() for t, n in zip(tensors, (group, 1, 1, group), strict=True)]
    alone = run(*last, width[-group:], documents[-1:])
    for some, whole in zip(alone, found, strict=True):
        assert torch.equal(some, whole[-1:, -some.shape[1] :])


def test_a_thousand_repeats() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(2, heads, LENGTH, 128, device="cuda", dtype=torch.bfloat16) for heads in (16, 4, 4, 16)]
    width = torch.randint(1, 900, (16,), device="cuda")
    documents = torch.zeros(2, LENGTH, dtype=torch.int64, device="cuda")
    run = step(causal_windows)
    assert not differing_runs(lambda: run(*tensors, width, documents), 1000)
