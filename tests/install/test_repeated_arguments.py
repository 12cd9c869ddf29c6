"""Autograd functions to which one tensor is passed twice, which Dynamo would run outside of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import Tensor

from dash_inductor import disabled
from dash_inductor.config import config
from dash_inductor.records.records import sites

from ..support.flash_attn import fa2_varlen
from ..support.packed import documents, packed_attention

BREAK = "autograd.Function.apply: duplicate tensor input"


class Gather(torch.autograd.Function):
    """The rows of x at some indices, times those of other indices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        ctx.save_for_backward(x, first, second)
        return x[first] * x[second]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]  # one gradient
        x, first, second = ctx.saved_tensors
        found = torch.zeros_like(x)
        found[first] += grad * x[second]
        found[second] += grad * x[first]
        return found, None, None


class Product(torch.autograd.Function):
    """a * b, whose gradient of a is twice the right one, so that the arguments can be told apart."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # one gradient
        a, b = ctx.saved_tensors
        return 2 * grad * b, grad * a


def breaks(run: Callable[[], Any]) -> list[str]:
    """The reasons for which Dynamo breaks graphs during a call."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run()
    return [reason.splitlines()[0] for reason in torch._dynamo.utils.counters["graph_break"]]


def gathered(x: Tensor, index: Tensor, backend: str = "aot_eager") -> tuple[Tensor, Tensor]:
    """The output and the gradient of `Gather` with one tensor for both indices."""
    own = x.clone().requires_grad_()
    out = torch.compile(lambda *t: Gather.apply(t[0], t[1], t[1]), backend=backend)(own, index)
    (grad,) = torch.autograd.grad(out.sum(), own)
    return out, grad


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("group", [1, 2])
def test_one_tensor_of_starts_for_queries_and_keys(group: int) -> None:
    """flash-attn's packed function is one graph, and both directions are replaced."""
    starts = documents(0, 100, 130, 300)
    q, k, v = (torch.randn(300, heads, 64, requires_grad=True) for heads in (4, 4 // group, 4 // group))
    with config.patch(cpu="reference"):
        compiled = torch.compile(lambda q, k, v, cu: fa2_varlen(q, k, v, cu, cu, 170, causal=True), fullgraph=True)
        out = compiled(q, k, v, starts)
        found = torch.autograd.grad(out.square().sum(), (q, k, v))
    (record,) = sites()
    assert record.status == "replaced"
    expected = packed_attention(q, k, v, starts, (-1, 0))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), (q, k, v)), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("deterministic")
def test_any_function() -> None:
    """The results are those of the program without a compiler."""
    x, index = torch.randn(6, 3), torch.tensor([1, 4, 0])
    own = x.clone().requires_grad_()
    eager = Gather.apply(own, index, index)  # type: ignore[no-untyped-call]
    expected = eager, torch.autograd.grad(eager.sum(), own)[0]
    assert breaks(lambda: torch.testing.assert_close(gathered(x, index), expected)) == []


@pytest.mark.usefixtures("deterministic")
def test_tensors_with_gradients_are_left_to_dynamo() -> None:
    """Each argument has its own gradient, whose sum is that of the tensor."""
    x = torch.randn(3, requires_grad=True)
    run = torch.compile(lambda t: Product.apply(t, t), backend="aot_eager")
    assert breaks(lambda: run(x).sum().backward()) in ([BREAK], [])
    torch.testing.assert_close(x.grad, 3 * x.detach())


@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_changes_without_us(deterministic: bool) -> None:
    x, index = torch.randn(6, 3), torch.tensor([1, 4, 0])
    torch.use_deterministic_algorithms(deterministic)
    try:
        if deterministic:
            with disabled():
                found = breaks(lambda: gathered(x, index))
        else:
            found = breaks(lambda: gathered(x, index))
    finally:
        torch.use_deterministic_algorithms(False)
    assert found in ([BREAK], [])  # [] with a Dynamo that can trace it
