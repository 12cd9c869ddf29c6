"""Masks whose outcome is proved: which, values, and results that share no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dash_inductor.passes.ops import known_masks
from dash_inductor.records.records import all_records, clear_sites

pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(known_masks, "DEVICES", ("cpu",))
    torch._dynamo.reset()
    clear_sites()
    yield
    torch._dynamo.reset()


def replaced() -> list[str]:
    return [r.detail for r in all_records() if getattr(r, "rewrite", "") == "known_masks" and r.status == "replaced"]


def rewritten(function: Callable[..., Any], *tensors: Tensor) -> tuple[Any, int]:
    """The results of a graph of a function that is rewritten, and how many masks were."""
    gm = make_fx(function, tracing_mode="fake")(*tensors)
    results = known_masks.KnownMasksRewrite().apply(gm.graph)
    gm.recompile()
    return gm(*tensors), len(results)


def experts(x: Tensor, scores: Tensor, local: int) -> Tensor:
    """Rows sorted by the expert that they go to, without those of experts that are not here."""
    numbers, order = scores.topk(2, -1).indices.reshape(-1).sort()
    absent = (numbers >= local).unsqueeze(-1)
    rows = x[order // 2].masked_fill(absent, 0.0)
    return (rows * rows).tanh().masked_fill(absent, 0.0)


def step(function: Callable[..., Tensor], x: Tensor, *rest: object) -> list[Tensor]:
    x = x.detach().requires_grad_()
    out = function(x, *rest)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), x)]


@pytest.mark.parametrize(("local", "count", "dynamic"), [(8, 4, False), (7, 0, False), (8, 4, True)])
def test_experts(local: int, count: int, dynamic: bool) -> None:
    """Masks of forward and backward; with fewer experts than there are, some rows are cleared."""
    torch.manual_seed(0)
    x, scores = torch.randn(12, 16), torch.randn(12, 8)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(scores, 0)
    found, plain = step(torch.compile(experts), x, scores, local), step(experts, x, scores, local)
    for ours, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert replaced() == count * ["its mask is false everywhere: what it chooses is read as it is"]


@pytest.mark.parametrize(
    ("mask", "chosen"),
    [
        (lambda i: i >= 8, 1), (lambda i: i > 7, 1), (lambda i: i < 0, 1), (lambda i: i <= -1, 1),
        (lambda i: i < 8, 0), (lambda i: i <= 7, 0), (lambda i: i >= 0, 0), (lambda i: i > -1, 0),
        (lambda i: i >= 7, None), (lambda i: i < 7, None), (lambda i: i > 0, None), (lambda i: i <= 0, None),
        (lambda i: i != 9, None), (lambda i: i + 1 > 7, None), (lambda i: i + 1 > 8, 1), (lambda i: i + 1 > 0, 0),
    ],
)  # fmt: skip
def test_comparisons(mask: Callable[[Tensor], Tensor], chosen: int | None) -> None:
    scores, a, b = torch.randn(4, 8), torch.randn(4, 2), torch.randn(4, 2)
    given = scores.topk(2, -1).indices

    def function(scores: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.where(mask(scores.topk(2, -1).indices), a + 1, b + 2) * 3

    found, count = rewritten(function, scores, a, b)
    assert torch.equal(found, torch.where(mask(given), a + 1, b + 2) * 3)
    assert count == (chosen is not None)


def test_results_share_no_memory() -> None:
    scores, a, b = torch.randn(4, 8), torch.randn(4, 2), torch.randn(4, 2)

    def function(scores: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        absent, sums = scores.topk(2, -1).indices >= 8, a + b
        return torch.where(absent, b, a), sums, torch.where(absent, a, sums).view(-1)

    (first, sums, second), count = rewritten(function, scores, a, b)
    assert len({t.untyped_storage().data_ptr() for t in (first, sums, second, a, b)}) == 5
    assert torch.equal(first, a)
    assert torch.equal(second.view(4, 2), sums)
    assert count == 0


def test_a_tensor_that_would_be_broadcast_stays() -> None:
    scores, a, b = torch.randn(4, 8), torch.randn(4, 2), torch.randn(1, 2)

    def function(scores: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.where(scores.topk(2, -1).indices >= 8, a, b) + 1

    found, count = rewritten(function, scores, a, b)
    assert torch.equal(found, (b + 1).expand(4, 2))
    assert count == 0
