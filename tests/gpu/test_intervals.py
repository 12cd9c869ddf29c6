"""Intervals of keys through torch.compile on a GPU: values, bits, and batch elements alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor import clear_sites, sites

from ..support.repeats import differing_runs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

SHAPES = [(3, 8, 2, 128, torch.bfloat16), (2, 4, 4, 64, torch.float16), (2, 2, 2, 256, torch.bfloat16)]
"""Batch, heads of query and of key, head dim, dtype."""


LENGTH = 1000


def positions(numbers: Tensor) -> tuple[Tensor, Tensor]:
    q = torch.arange(numbers.shape[1], device=numbers.device)
    return q[:, None], q[None]


def starts(numbers: Tensor) -> Tensor:
    """Causal, from the first token of the query's document on."""
    q, kv = positions(numbers)
    return ((q >= kv) & (kv >= numbers[:, :, None]))[:, None]


def prefix(numbers: Tensor) -> Tensor:
    """Causal, with as many first keys that everyone sees as the last number says."""
    q, kv = positions(numbers)
    return ((q >= kv) | (kv <= numbers[:, -1, None, None]))[:, None]


def compared(numbers: Tensor) -> Tensor:
    """Keys whose number is at most the query's."""
    return (numbers[:, None] % 7 <= numbers[:, :, None] % 7)[:, None]


def starts_of_few(numbers: Tensor) -> Tensor:
    """Keys of the same kind in the document."""
    return starts(numbers) & (numbers[:, None] % 3 == numbers[:, :, None] % 3)[:, None]


MASKS: dict[Callable[[Tensor], Tensor], str] = {
    starts: "causal & interval(0,none,none)",
    prefix: "interval(none,0,none)",
    compared: "interval(none,0,1)",
    starts_of_few: "causal & segments(0,1) & interval(2,none,none)",
}


def numbers_of(batch: int) -> Tensor:
    """The first token of every token's document, int64 [batch, LENGTH]."""
    generator = torch.Generator().manual_seed(batch)
    begins = torch.randint(0, 150, (batch, LENGTH), generator=generator) == 0
    places = torch.arange(LENGTH).expand(batch, -1)
    return torch.where(begins, places, 0).cummax(1).values.cuda()


def step(make: Callable[[Tensor], Tensor], dynamic: bool) -> Callable[..., list[Tensor]]:
    torch._dynamo.reset()

    @torch.compile(dynamic=False)
    def attention(q: Tensor, k: Tensor, v: Tensor, numbers: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=make(numbers))

    def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor, numbers: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        if dynamic:
            for t, dim in (*((t, 2) for t in leaves), (numbers, 1)):
                torch._dynamo.mark_dynamic(t, dim)
        out = attention(*leaves, numbers)
        return [out.detach(), *torch.autograd.grad(out, leaves, do)]

    return run


def exact(tensors: list[Tensor], keep: Tensor) -> list[Tensor]:
    q, k, v, do = (t.double() for t in tensors)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    k_, v_ = (t.repeat_interleave(group, 1) for t in leaves[1:])
    s = (q @ k_.mT) * q.shape[-1] ** -0.5
    p = torch.where(keep, s, float("-inf")).softmax(-1)
    out = torch.where(keep.any(-1, keepdim=True), p.nan_to_num(0.0), 0.0) @ v_
    return [out.detach(), *torch.autograd.grad(out, leaves, do)]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"d{shape[3]}")
@pytest.mark.parametrize("make", MASKS, ids=lambda make: make.__name__)
def test_intervals(make, shape, dynamic) -> None:
    batch, q_heads, kv_heads, dim, dtype = shape
    torch.manual_seed(0)
    sizes = (q_heads, kv_heads, kv_heads, q_heads)
    tensors = [torch.randn(batch, heads, LENGTH, dim, device="cuda", dtype=dtype) for heads in sizes]
    numbers = numbers_of(batch)
    clear_sites()
    run = step(make, dynamic)
    found = run(*tensors, numbers)
    (site,) = sites()
    assert site.mask == MASKS[make], site
    on_hopper = torch.cuda.get_device_capability() == (9, 0)
    assert not on_hopper or str(site.plan).startswith("hopper"), site
    eager = exact([t.to(dtype) for t in tensors], make(numbers))
    for ours, true in zip(found, eager, strict=True):
        error = (ours.double() - true).norm() / true.norm()
        assert error < (8e-3 if dtype == torch.bfloat16 else 1e-3)
    assert not differing_runs(lambda: run(*tensors, numbers), 50)
    # Batch elements alone have the same bits.
    for b in range(batch):
        alone = run(*(t[b : b + 1] for t in tensors), numbers[b : b + 1])
        assert all(torch.equal(a, whole[b : b + 1]) for a, whole in zip(alone, found, strict=True))


def test_a_thousand_repeats() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(2, heads, LENGTH, 128, device="cuda", dtype=torch.bfloat16) for heads in (16, 4, 4, 16)]
    numbers = numbers_of(2)
    run = step(starts, False)
    assert not differing_runs(lambda: run(*tensors, numbers), 1000)
