"""Training: activation checkpointing, compiled autograd, several layers, optimiser steps that repeat bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from dash_inductor.records.records import sites

from ...support.graphs import BACKWARD, CPU_BACKWARD, CPU_FORWARD, FORWARD, capture

pytestmark = pytest.mark.usefixtures("deterministic")

LAYERS = 2


class Attention(nn.Module):
    """Fused projection, so that query, key and value are strided views of one tensor."""

    def __init__(self, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).reshape(batch, length, dim))


class Model(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention() for _ in range(LAYERS)])
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x))
        return x


def model_and_input(checkpointed: bool = False) -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    return Model(checkpointed), torch.randn(2, 40, 32)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def expected(checkpointed: bool = False, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    model, x = model_and_input(checkpointed)
    model.to(dtype)(x.to(dtype)).square().mean().backward()
    return gradients(model)


def assert_gradients_as_exact(model: nn.Module) -> None:
    """At most twice as far from double precision as eager, plus 8 units in the last place of the largest element."""
    for ours, eager, exact in zip(gradients(model), expected(), expected(dtype=torch.float64), strict=True):
        floor = 8 * torch.finfo(torch.float32).eps * exact.abs().max()
        assert (ours - exact).abs().max() <= 2 * (eager - exact).abs().max() + floor


@pytest.mark.parametrize("checkpointed", [False, True])
def test_layers(checkpointed: bool) -> None:
    """A checkpointed layer runs its forward again in the backward graph: the new nodes carry the old ones' tags."""
    model, x = model_and_input(checkpointed)
    with capture() as graphs:
        graphs.compile(model)(x).square().mean().backward()
    assert (graphs.count(CPU_FORWARD), graphs.count(CPU_BACKWARD)) == (0, 0)
    assert (graphs.count(FORWARD), graphs.count(BACKWARD)) == (LAYERS, LAYERS)
    forward, backward = graphs.partitions
    assert (forward[FORWARD], forward[BACKWARD]) == (LAYERS, 0)
    assert (backward[FORWARD], backward[BACKWARD]) == (LAYERS if checkpointed else 0, LAYERS)
    assert {r.source.rsplit(" in ", 1)[-1] for r in sites()} == {"layers.0", "layers.1"}
    assert_gradients_as_exact(model)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_autograd(checkpointed: bool) -> None:
    model, x = model_and_input(checkpointed)
    with capture() as graphs, torch._dynamo.config.patch(compiled_autograd=True):
        compiled = graphs.compile(model)

        def train(x: Tensor) -> None:
            compiled(x).square().mean().backward()

        counters.clear()
        graphs.compile(train)(x)
    assert counters["compiled_autograd"]["captures"] == 1
    assert graphs.count(CPU_BACKWARD) == 0
    assert graphs.count(BACKWARD) >= LAYERS
    assert {r.status for r in sites()} == {"replaced"}
    assert_gradients_as_exact(model)


def test_training_repeats_bit_for_bit() -> None:
    def train() -> list[Tensor]:
        model, x = model_and_input()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        compiled = graphs.compile(model)
        for _ in range(3):
            optimizer.zero_grad()
            compiled(x).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    with capture() as graphs:
        first = train()
        torch._dynamo.reset()
        second = train()
    assert graphs.count(BACKWARD) == 2 * LAYERS
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("scale", [-0.4, 0.0, 0.4])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_scales_that_are_not_positive(scale: float, causal: bool) -> None:
    """PyTorch's CPU kernel gives NaN for `is_causal` and such scales; ours does not."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(50, 50, dtype=torch.bool).tril() if causal else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)

    def train(attend: object, dtype: torch.dtype) -> list[Tensor]:
        assert callable(attend)
        torch.manual_seed(0)
        leaves = [torch.randn(2, 3, 50, 16, dtype=torch.float32).to(dtype).requires_grad_() for _ in range(3)]
        out = attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    with capture() as graphs:
        ours = train(graphs.compile(attend), torch.float32)
    assert graphs.count(BACKWARD) == 1
    (record,) = sites()
    assert record.forward == "reference"
    for a, b in zip(ours, train(attend, torch.float64), strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-4)
