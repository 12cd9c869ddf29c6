"""Operators that raise an error of PyTorch's under deterministic algorithms, on a GPU in a compiled graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


def unpooled(x: Tensor) -> Tensor:
    largest, places = F.max_pool2d(x[None].detach(), 2, return_indices=True)
    return F.max_unpool2d(largest * x[:, ::2, ::2], places, 2)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "median": lambda x: x.median(1).values,
    "kthvalue": lambda x: x.kthvalue(3, 2).values,
    "histc": lambda x: x.histc(20, -3, 3) + x.sum() * 0,
    "max_unpool2d": unpooled,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_gradients_and_bits(name: str) -> None:
    function = FUNCTIONS[name]
    torch.manual_seed(0)
    x = torch.randn(6, 40, 70, device="cuda").mul(8).round().div(8).requires_grad_()  # with equal elements
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)
    found = []
    for _ in range(3):
        out = compiled(x)
        found.append((out.detach(), *torch.autograd.grad(out.square().sum(), x)))
    assert all(all(map(torch.equal, found[0], again)) for again in found[1:])
    given = x.detach().cpu().requires_grad_()
    torch.use_deterministic_algorithms(False)
    out = function(given)
    (gradient,) = torch.autograd.grad(out.square().sum(), given)
    torch.testing.assert_close(found[0][0].cpu(), out.detach())
    if name in ("histc", "max_unpool2d"):  # others give it to one of equal elements
        torch.testing.assert_close(found[0][1].cpu(), gradient)
    else:
        torch.testing.assert_close(found[0][1].sum().cpu(), gradient.sum())
