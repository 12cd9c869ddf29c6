"""Kernels whose blocks are chosen by a rule: values, and the same bits when they are compiled again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import fresh_inductor_cache, run_and_get_code

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


def across(x: Tensor) -> Tensor:
    return x.float().square().sum(1)


def short(x: Tensor) -> Tensor:
    """24 rows: neither additions nor a loop."""
    return x.view(x.shape[0], -1, 24, x.shape[2]).float().square().sum(2)


def adaptive(x: Tensor) -> Tensor:
    scale = x[:, :1].detach()
    return F.layer_norm(x, x.shape[2:]) * (1 + scale)


def along(x: Tensor) -> Tensor:
    return torch.softmax(x.float().repeat(1, 1, 2), -1)


def turned(x: Tensor) -> Tensor:
    return (torch.sin(x.mT) + x.mT.cos()).contiguous() + x.reshape(x.shape[0], x.shape[2], x.shape[1])


def broadcast(x: Tensor) -> Tensor:
    """Sums in three dimensions: of 64, which need no loop, and of 256."""
    few, many = x[:2, :64, :64].float(), x[:2, :256, :256].float()
    return sum_of_products(few).sum() + sum_of_products(many)


def sum_of_products(x: Tensor) -> Tensor:
    return (x[:, :, None] * x.mT[:, None]).sum(-1) * x.mT + x


@pytest.mark.parametrize("function", [across, short, adaptive, along, turned, broadcast])
def test_values_and_bits(function: object) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 480, 1152, device="cuda").bfloat16().requires_grad_()
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        with fresh_inductor_cache():
            out, codes = run_and_get_code(torch.compile(function), x)  # type: ignore[arg-type]
            upstream = torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape).to(out.dtype)
            (gradient,) = torch.autograd.grad(out, x, upstream)
        found.append((out.detach(), gradient))
        if function is not turned:
            assert any("fixed_config" in code for code in codes) or function is adaptive
    assert all(map(torch.equal, *found))
    exact = x.detach().double().requires_grad_()
    wanted = function(exact)  # type: ignore[operator]
    wanted_gradient = torch.autograd.grad(wanted, exact, upstream.double())[0]
    for a, b in zip(found[0], (wanted.detach(), wanted_gradient), strict=True):
        assert (a.double() - b).norm() <= 1e-2 * b.norm()
