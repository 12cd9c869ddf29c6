"""The bits of a head on a GPU, whichever heads stand beside it: alone, at any place, with heads split over ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dash_inductor
from dash_inductor.model import Band

from ..support import hopper_calls, hopper_forward
from ..support.attention import Attention
from ..support.calls import backward_spec
from ..support.hopper import MARKS

pytestmark = MARKS

Results = tuple[Tensor, ...]
"""out, log-sum-exp, dq, dk and dv: [batch, heads, ...]."""
HEADS = 64

# head dims of q and of v, mask, lengths: q tiles are 64 or, at head dim 64, 128 rows high, and `bent_fold` bends tile
# schedules over 64 of them
SHAPES = [
    (128, 128, Band(0), 4200, 4200),
    (128, 128, Band(0), 1000, 1000),
    (128, 128, Band(), 1000, 1100),
    (128, 128, Band(0, 299), 1500, 1500),
    (128, 128, Band(-70), 4200, 3000),
    (64, 64, Band(0), 8300, 8300),
    (192, 128, Band(0, None, "bottom_right"), 4100, 4500),
    (256, 256, Band(0), 4100, 4100),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def problem(shape: tuple[int, int, Band, int, int], kv_heads: int, group: int) -> Attention:
    head_dim, value_dim, mask, q_len, kv_len = shape
    how = {"batch": 1, "kv_heads": kv_heads, "group": group, "value_dim": value_dim}
    return Attention.random(q_len, kv_len, head_dim, mask, **how)  # type: ignore[arg-type]  # integers all of them


def run(p: Attention) -> Results:
    """Forward and backward under the plan that the planner makes for a call with these heads."""
    out, lse = hopper_forward.forward(p)
    gradients = hopper_calls.backward(p.do, p.q, p.k, p.v, out, lse, backward_spec(p.mask, p.scale), p.plan())
    return out, lse, *gradients


def of_heads(p: Attention, kv_heads: Sequence[int]) -> Attention:
    """The problem with some of its kv heads, in this order, and their query heads."""
    query_heads = [h * p.group + member for h in kv_heads for member in range(p.group)]
    keys, queries = list(kv_heads), query_heads
    return dataclasses.replace(p, q=p.q[:, queries], k=p.k[:, keys], v=p.v[:, keys], do=p.do[:, queries])


def of_results(p: Attention, results: Results, kv_heads: Sequence[int]) -> Results:
    query_heads = [h * p.group + member for h in kv_heads for member in range(p.group)]
    out, lse, dq, dk, dv = results
    return out[:, query_heads], lse[:, query_heads], dq[:, query_heads], dk[:, kv_heads], dv[:, kv_heads]


def same(a: Results, b: Results) -> bool:
    return all(map(torch.equal, a, b))


@shapes
def test_a_head_alone_and_at_every_place(shape: tuple[int, int, Band, int, int]) -> None:
    """Every one of 64 heads alone; then it goes through all places of calls with 2 to 64 heads."""
    p = problem(shape, HEADS, 1)
    whole = run(p)
    for h in range(HEADS):
        assert same(run(of_heads(p, [h])), of_results(p, whole, [h])), f"head {h} alone"
    for count in (2, 3, 4, 5, 8, 13, 16, 32, 63, 64):
        for first in range(0, HEADS, max(1, HEADS // count)):
            heads = [(first + 7 * i) % HEADS for i in range(count)]  # 7 and 64 have no common divisor
            assert same(run(of_heads(p, heads)), of_results(p, whole, heads)), f"heads {heads}"


@pytest.mark.parametrize("group", [2, 4, 8])
@shapes
def test_groups_split_over_ranks(shape: tuple[int, int, Band, int, int], group: int) -> None:
    """The kv heads with their query heads in equal shares, as tensor parallelism deals them out."""
    p = problem(shape, 8, group)
    whole = run(p)
    for ranks in (2, 4, 8):
        share = 8 // ranks
        for rank in range(ranks):
            heads = list(range(rank * share, (rank + 1) * share))
            assert same(run(of_heads(p, heads)), of_results(p, whole, heads)), f"rank {rank} of {ranks}"


@pytest.fixture
def compiled() -> Iterator[Callable[..., list[Tensor]]]:
    """Forward and backward of scaled_dot_product_attention, compiled anew for every number of heads."""

    def step(q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Tensor | None) -> list[Tensor]:
        torch._dynamo.reset()
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        group = q.shape[1] // k.shape[1]

        def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            k, v = (t.repeat_interleave(group, 1) for t in (k, v))
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)

        out = torch.compile(attention, dynamic=False)(*leaves, mask)
        out.backward(do)
        site = dash_inductor.sites()[-1]
        assert site.status == "replaced", site
        return [out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]  # all have one

    torch.use_deterministic_algorithms(True)
    yield step
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kind", ["causal", "padded", "dense by head", "fp32"])
def test_compiled_heads_split_over_ranks(compiled: Callable[..., list[Tensor]], kind: str) -> None:
    """16 query heads on 4, whole and in the shares of 2 and 4 ranks."""
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    length = 512 if kind == "fp32" else 4200
    p = Attention.random(length, length, 128, Band(0), batch=2, kv_heads=4, group=4, dtype=dtype)
    causal = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()
    mask = None
    if kind == "padded":
        valid = torch.arange(length, device="cuda") < torch.tensor([[length], [length - 777]], device="cuda")
        mask = causal & valid[:, None, None, :]
    elif kind == "dense by head":
        near = torch.arange(16, device="cuda")[:, None, None] * 100 + 200
        distance = torch.arange(length, device="cuda")[:, None] - torch.arange(length, device="cuda")
        mask = (causal & (distance < near))[None].expand(2, -1, -1, -1)
    whole = compiled(p.q, p.k, p.v, p.do, mask)
    for ranks in (2, 4):
        for rank in range(ranks):
            kv = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
            q = slice(kv.start * 4, kv.stop * 4)
            own = mask if mask is None or mask.shape[1] == 1 else mask[:, q]
            found = compiled(p.q[:, q], p.k[:, kv], p.v[:, kv], p.do[:, q], own)
            for a, b, heads in zip(found, whole, (q, q, kv, kv), strict=True):
                assert torch.equal(a, b[:, heads]), f"rank {rank} of {ranks}"
