"""Zeros for results without a gradient: the same values as autograd's, in memory that is written once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dash_inductor.config import config

Results = tuple[Tensor, ...]


@pytest.fixture(autouse=True)
def fresh(deterministic: None) -> None:
    torch._dynamo.reset()


def several(x: Tensor, y: Tensor) -> Results:
    """Results of several kinds: with a gradient, whole numbers, a view of another result, a number, an argument."""
    y.mul_(2)
    a = (x @ y).relu()
    return a, a > 0, a[:, 1:], a.sum(), (a * 3).bfloat16(), x, a.argmax(1), a.detach()


DIFFERENTIABLE = (0, 2, 3, 4)


def step(function: Callable[..., Results], used: int, rows: int = 8) -> tuple[list[Tensor | None], dict[str, int]]:
    """Gradients by one of the results, and how often the backward has filled memory and made zeros."""
    torch.manual_seed(0)
    x, leaf = torch.randn(rows, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    results = function(x, leaf * 1)
    loss = results[used].float().square().sum()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        found = torch.autograd.grad(loss, [x, leaf], allow_unused=True)
    within = [e for e in profiled.events() if _is_inside(e, "CompiledFunctionBackward")]
    counts = {name: sum(e.name == f"aten::{name}" for e in within) for name in ("fill_", "zero_")}
    return [*found], counts


def _is_inside(event: object, name: str) -> bool:
    while event is not None:
        event = event.cpu_parent  # type: ignore[attr-defined]
        if event is not None and event.name.endswith(name):
            return True
    return False


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.full)])
def test_gradients(dynamic: bool) -> None:
    cases = [(used, rows) for used in DIFFERENTIABLE for rows in ((8, 12) if dynamic else (8,))]
    found = {}
    for fill in ("on", "off"):
        torch._dynamo.reset()
        with config.patch(fill=fill):
            function = torch.compile(several, dynamic=dynamic)
            step(function, 0)  # a compile fills, too
            found[fill] = [step(function, *case) for case in cases]
    for (theirs, filled), (ours, counts) in zip(found["on"], found["off"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert filled["fill_"] >= filled["zero_"] > 0
        assert counts == {"fill_": 0, "zero_": filled["zero_"]}


def test_all_gradients_given() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    a, b = torch.compile(lambda x: (x.sin(), x.cos()))(x)
    (found,) = torch.autograd.grad([a, b], x, [torch.ones_like(a), torch.ones_like(b)])
    torch.testing.assert_close(found, x.cos() - x.sin())


def test_what_leaves_memory_unwritten_keeps_its_fill() -> None:
    """Zeros need no operators that are known to write all: only they go without fill."""
    x = torch.randn(4, 4, requires_grad=True)
    flags = []
    x.register_hook(lambda grad: flags.append(torch.empty(3).isnan().all().item()))
    torch.compile(lambda x: (x.sin(), x.cos()))(x)[0].sum().backward()
    assert flags == [True]
    assert torch.empty(3).isnan().all()


def test_compiled_autograd() -> None:
    """It traces backwards by itself, and makes the zeros as ever."""
    x = torch.randn(4, 4, requires_grad=True)
    ours = torch.compile(lambda x: (x.sin(), x.cos()))
    ours(x)[1].sum().backward()
    expected, x.grad = x.grad, None
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: ours(x)[1].sum().backward())()
    assert expected is not None
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def test_kept_graph_and_second_derivatives() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    a, b = torch.compile(lambda x: (x.sin(), x.cos()))(x)
    first = torch.autograd.grad(a.sum(), x, retain_graph=True)[0]
    again = torch.autograd.grad(a.sum(), x, retain_graph=True)[0]
    other = torch.autograd.grad(b.sum(), x, create_graph=True)[0]
    assert torch.equal(first, again)
    torch.testing.assert_close(other, -x.sin())
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(other.sum(), x)
