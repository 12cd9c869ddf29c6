"""Forwards of few queries against many keys on a GPU: against fp64, and bit by bit; a compiled step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dash_inductor
from dash_inductor.kernels.hopper.forward import few
from dash_inductor.model import Band

from ..support import hopper_calls
from ..support.attention import Attention
from ..support.hopper import MARKS
from ..support.hopper_forward import check, forward, repeated
from ..support.repeats import bits, differing_runs

pytestmark = MARKS

# head dims of q and of v, queries, keys, query heads of a group: tiles of 16, 32 and 64 rows, 3 to 64 parts
SHAPES = [
    (64, 64, 1, 1025, 1),
    (64, 64, 16, 4096, 1),
    (128, 128, 1, 4097, 8),
    (128, 128, 5, 40000, 4),
    (128, 128, 8, 131072, 8),
    (40, 40, 3, 2000, 2),
    (192, 128, 1, 8191, 4),
    (256, 256, 2, 5000, 1),
    (256, 256, 16, 3000, 4),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def problem(shape: tuple[int, ...], **how: Any) -> Attention:
    head_dim, value_dim, q_len, kv_len, group = shape
    few_heads = 1 if kv_len > 1 << 16 else 2  # fp64 takes memory
    how = {"batch": few_heads, "kv_heads": few_heads, "group": group, "value_dim": value_dim} | how
    return Attention.random(q_len, kv_len, head_dim, Band(), **how)


@pytest.fixture
def sites() -> Iterator[list[Any]]:
    """The sites of few queries whose launches are prepared."""
    seen: list[Any] = []
    launches = few.launches

    def noted(site: Any, *tensors: Any) -> Any:
        seen.append(site)
        return launches(site, *tensors)

    hopper_calls.forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(few, "launches", noted)
        yield seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@shapes
def test_values(shape: tuple[int, ...], dtype: torch.dtype, sites: list[Any]) -> None:
    p = problem(shape, dtype=dtype)
    check(p, forward(p), library=False, logsumexp=True)
    p = dataclasses.replace(p, scale=-2.0 * p.scale)
    check(p, forward(p), library=False, logsumexp=True)
    assert len(sites) == 2


@pytest.mark.parametrize("load", [False, True])
@shapes
def test_equal_bits(shape: tuple[int, ...], load: bool) -> None:
    assert differing_runs(repeated(problem(shape)), 100, load=load, poisoned=True) == 0


@shapes
def test_heads_and_batch_elements_alone(shape: tuple[int, ...]) -> None:
    p = problem(shape, batch=3, kv_heads=3)
    whole = [bits(t) for t in forward(p)]
    group = p.group
    for b, head in ((0, 2), (2, 1)):
        queries = slice(head * group, (head + 1) * group)
        alone = dataclasses.replace(
            p, q=p.q[b : b + 1, queries].clone(), k=p.k[b : b + 1, head : head + 1].clone(),
            v=p.v[b : b + 1, head : head + 1].clone(), do=p.do[b : b + 1, queries],
        )  # fmt: skip
        for one, all_ in zip(forward(alone), whole, strict=True):
            assert torch.equal(bits(one[0]), all_[b, queries])


def test_control_another_length_of_parts_has_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests compare would show a split that depends on something else."""
    p = problem(SHAPES[3])
    before = bits(forward(p)[0])
    hopper_calls.forget()
    monkeypatch.setattr(few, "part_of", lambda kv_len: 2048)
    assert not torch.equal(bits(forward(p)[0]), before)
    hopper_calls.forget()


def test_a_graph_replays_its_bits() -> None:
    p = problem(SHAPES[2])
    expected = [bits(t) for t in forward(p)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = forward(p)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, map(bits, found), expected))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_step(dynamic: bool, sites: list[Any]) -> None:
    """The site is replaced, its gradients are close to fp64, and the same with static and with dynamic lengths."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    p = problem((64, 64, 4, 3000 + dynamic, 4))  # a layout of this test alone
    results = []
    torch.use_deterministic_algorithms(True)
    try:
        for dynamic_lengths in (dynamic, not dynamic):
            torch._dynamo.reset()
            leaves = [t.detach().clone().requires_grad_() for t in (p.q, p.k, p.v)]
            out = torch.compile(attend, dynamic=dynamic_lengths)(*leaves)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, p.do)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert {site.status for site in dash_inductor.sites()} == {"replaced"}
    assert sites  # one layout, prepared once
    assert all(map(torch.equal, *(map(bits, found) for found in results)))
    leaves = [t.double().requires_grad_() for t in (p.q, p.k, p.v)]
    out = attend(*leaves)
    exact = [out.detach(), *torch.autograd.grad(out, leaves, p.do.double())]
    for found, wanted in zip(results[0], exact, strict=True):
        assert float((found.double() - wanted).norm() / wanted.norm()) < 0.01
