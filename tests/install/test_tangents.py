"""Zeros for results without a gradient: the same values as autograd's, in memory that is written once."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dash_inductor.config import config
from dash_inductor.graph import one_device
from dash_inductor.install.fill_uninitialized_memory import ALL_WRITTEN, ONE_DEVICE, _only_reads
from dash_inductor.upstream import zero_pages

from ..support.mapped_memory import CpuPage

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


def _is_inside(event: Any, name: str) -> bool:
    while event is not None:
        event = event.cpu_parent
        if event is not None and event.name.endswith(name):
            return True
    return False


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.full)])
def test_gradients(dynamic: bool) -> None:
    cases = [(used, rows) for used in DIFFERENTIABLE for rows in ((8, 12) if dynamic else (8,))]
    found = {}
    for fill in (True, False):
        torch._dynamo.reset()
        with config.patch(fill_uninitialized_memory=fill):
            function = torch.compile(several, dynamic=dynamic)
            step(function, 0)  # a compile fills, too
            found[fill] = [step(function, *case) for case in cases]
    for (theirs, filled), (ours, counts) in zip(found[True], found[False], strict=True):
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


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Zeros of any size are on pages that cannot be written: for each that is asked for, whether it was."""
    asked: list[bool] = []
    plain = zero_pages.zeros

    def counted(*about: Any) -> Tensor | None:
        found = plain(*about)
        asked.append(found is not None)
        return found

    monkeypatch.setitem(zero_pages.PAGES, "cpu", CpuPage)
    monkeypatch.setattr(zero_pages, "LEAST", 1)
    assert plain((4096,), torch.uint8, torch.device("cpu")) is not None
    monkeypatch.setattr(zero_pages, "zeros", counted)
    return asked


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.full)])
def test_gradients_by_zeros_that_take_no_memory(dynamic: bool, pages: list[bool]) -> None:
    """Where a backward is compiled when it is called first, the zeros of that call are there already."""
    cases = [(used, rows) for used in (2, 3) for rows in ((8, 12) if dynamic else (8,))]
    found = {}
    for fill in (True, False):
        torch._dynamo.reset()
        with config.patch(fill_uninitialized_memory=fill), torch._inductor.config.patch(force_disable_caches=True):
            function = torch.compile(several, dynamic=dynamic)
            step(function, 0)
            assert dynamic or not pages
            pages.clear()
            found[fill] = [step(function, *case) for case in cases]
    missing = len(DIFFERENTIABLE) - 1
    assert pages == [True] * missing * len(cases)
    for (theirs, _), (ours, counts) in zip(found[True], found[False], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert counts == {"fill_": 0, "zero_": 0}


def test_gradients_that_are_zeros_belong_to_the_program(pages: list[bool]) -> None:
    """A backward may hand on what it is given, as a whole, as a view, or several times."""

    def handed_on(x: Tensor, y: Tensor, z: Tensor) -> Results:
        return x + 1, y.view(4, 16) - 2, z.expand(3, 8, 8) + 0.5, (x * y).sin()

    function = torch.compile(handed_on)
    leaves = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]
    for again in range(3):
        found = torch.autograd.grad(function(*leaves)[again // 2 * 3].sum(), leaves)
        assert len({gradient.data_ptr() for gradient in found}) == len(found)
        for gradient in found:
            before = gradient.clone()
            gradient += 1
            assert torch.equal(gradient, before + 1)
        assert not found[2].sub(1).any()
    assert pages == [True] * 6


def test_accumulated_gradients(pages: list[bool]) -> None:
    x, y = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    function = torch.compile(lambda x, y: (x + 1, (y * 2).sin()))
    for _ in range(3):
        function(x, y)[1].sum().backward()
    assert x.grad is not None
    assert not x.grad.any()
    assert pages == [True, True]


class Counts(torch.autograd.Function):
    """A backward that writes to a tensor of the program."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Tensor) -> Tensor:
        ctx.save_for_backward(count)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        with torch.no_grad():
            ctx.saved_tensors[0].add_(1)
        return gradient * 2, None


def test_backwards_that_write_to_an_argument_get_memory(pages: list[bool]) -> None:
    """Which one they write to is not asked."""
    x, count = torch.randn(8, 8, requires_grad=True), torch.zeros(())
    function = torch.compile(lambda x, count: (Counts.apply(x, count), x.sin()))
    for _ in range(3):
        (found,) = torch.autograd.grad(function(x, count)[1].sum(), x)
    torch.testing.assert_close(found, x.cos())
    assert count == 3
    assert not pages


def test_backwards_with_operators_of_the_program_get_memory(pages: list[bool]) -> None:
    """What they write is known to nobody."""
    library = torch.library.Library("of_the_program", "FRAGMENT")
    library.define("doubled(Tensor x) -> Tensor")
    library.impl("doubled", lambda x: x.mul_(2).clone(), "CPU")  # which its schema does not say
    library.impl("doubled", torch.empty_like, "Meta")
    doubled = torch.library.custom_op(
        "of_the_program::twice", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    doubled.register_fake(torch.empty_like)
    doubled.register_autograd(lambda ctx, gradient: torch.ops.of_the_program.doubled(gradient))
    x = torch.randn(8, 8, requires_grad=True)
    function = torch.compile(lambda x: (torch.ops.of_the_program.twice(x), x.sin()))
    for _ in range(3):
        (found,) = torch.autograd.grad(function(x)[1].sum(), x)
    torch.testing.assert_close(found, x.cos())
    assert not pages
    library._destroy()


def test_backwards_that_read_elsewhere_get_memory(pages: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a backward on two devices does."""
    monkeypatch.setattr(one_device, "stays_on_its_device", lambda gm: False)
    x = torch.randn(8, 8, requires_grad=True)
    function = torch.compile(lambda x: (x.sin(), x.cos()))
    for _ in range(3):
        (found,) = torch.autograd.grad(function(x)[1].sum(), x)
    torch.testing.assert_close(found, -x.sin())
    assert not pages


def test_a_kept_graph_with_zeros_that_take_no_memory(pages: list[bool]) -> None:
    """Other results are without a gradient every time."""
    x = torch.randn(8, 8, requires_grad=True)
    function = torch.compile(lambda x: (x.sin(), x.cos(), x * 3))
    for _ in range(2):
        results = function(x)
        found = [torch.autograd.grad(result.sum(), x, retain_graph=True)[0] for result in (*results, results[0])]
    for gradient, expected in zip(found, (x.cos(), -x.sin(), torch.full_like(x, 3), x.cos()), strict=True):
        torch.testing.assert_close(gradient, expected)
    assert pages == [True] * 2 * 7


KNOWN = {ALL_WRITTEN: True, ONE_DEVICE: True}


@pytest.mark.parametrize(
    ("about", "found"),
    [
        ({}, False),
        ({**KNOWN}, False),  # it does not say what it writes
        ({**KNOWN, "mutated_inputs": {"primals_1"}}, False),
        ({"mutated_inputs": set()}, False),
        ({ALL_WRITTEN: True, "mutated_inputs": set()}, False),
        ({ONE_DEVICE: True, "mutated_inputs": set()}, False),
        ({**KNOWN, "mutated_inputs": set()}, True),
    ],
)
def test_what_is_known_to_write_to_no_input(about: dict[str, Any], found: bool) -> None:
    assert _only_reads(SimpleNamespace(**about)) is found
    assert not _only_reads(None)  # a backward that has not been compiled yet
