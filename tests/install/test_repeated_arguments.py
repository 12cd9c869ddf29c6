"""Autograd functions to which one tensor is passed twice, which Dynamo would run outside of the graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch.nn.functional as F
from torch import Tensor

from dash_inductor import disabled
from dash_inductor.config import config
from dash_inductor.integrations.flash_attn import flash_attn_func
from dash_inductor.records.records import sites

from ..support.flash_attn import FA3, fa2, fa2_varlen
from ..support.graphs import capture, step, tensors
from ..support.packed import documents, packed_attention

BREAK = "autograd.Function.apply: duplicate tensor input"


class GatherAttention(torch.autograd.Function):
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


class ProductAttention(torch.autograd.Function):
    """a * b, whose gradient of a is twice the right one, so that the arguments can be told apart."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # one gradient
        a, b = ctx.saved_tensors
        return 2 * grad * b, grad * a


class Forwards(torch.autograd.Function):
    """A function that depends on whether its arguments are one tensor; `way` says how."""

    @staticmethod
    def forward(ctx: Any, way: str, a: Tensor, b: Tensor) -> Any:
        ctx.save_for_backward(a.detach().clone(), b)
        if way == "is":
            return a * b if _is_one(a, b) else a * b + 1
        if way == "leaf":
            return a * b + b.is_leaf
        if way == "dirty":
            ctx.mark_dirty(a)
            return a.mul_(2)
        return {"both": lambda: (a, b), "second": lambda: b, "view": lambda: (a * 1, b.t())}[way]()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *more: Tensor) -> tuple[None, Tensor, Tensor]:  # type: ignore[override]
        one, _ = ctx.saved_tensors
        return None, 2 * grad * one + sum(more), 3 * grad * grad + 5 * sum(more)


def _is_one(a: Tensor, b: Tensor) -> bool:
    return a is b


def self_packed(x: Tensor) -> Tensor:
    starts = torch.tensor([0, 13, x.shape[0]], dtype=torch.int32)
    found: Tensor = fa2_varlen(x, x, x, starts, starts, 170, causal=True)
    return found


def fused(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """`scaled_dot_product_attention` of tensors [batch, length, heads, head dim]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)


Attention = Callable[..., Tensor]
PACKAGES: dict[str, Attention] = {"2": fa2, "3": FA3, "door": flash_attn_func, "SDPA": fused}
WAYS: dict[str, tuple[Callable[..., Tensor], list[int]]] = {
    "all": (lambda attend, x: attend(x, x, x, causal=True), [4]),
    "key and value": (lambda attend, q, x: attend(q, x, x), [4, 2]),
    "query and value": (lambda attend, x, k: attend(x, k, x, causal=True), [4, 4]),
    "documents": (lambda attend, x: self_packed(x.flatten(0, 1)), [4]),
}
"""Which of query, key and value are one tensor, and the numbers of heads of the tensors."""
TIED = [(package, way) for package in PACKAGES for way in WAYS if way != "documents" or package == "2"]


def breaks(run: Callable[[], Any]) -> list[str]:
    """The reasons for which Dynamo breaks graphs during a call."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run()
    return [reason.splitlines()[0] for reason in torch._dynamo.utils.counters["graph_break"]]


def gathered(x: Tensor, index: Tensor, backend: str = "aot_eager") -> tuple[Tensor, Tensor]:
    """The output and the gradient of `GatherAttention` with one tensor for both indices."""
    own = x.clone().requires_grad_()
    out = torch.compile(lambda *t: GatherAttention.apply(t[0], t[1], t[1]), backend=backend)(own, index)
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
def test_a_function_named_like_attention() -> None:
    """The results are those of the program without a compiler."""
    x, index = torch.randn(6, 3), torch.tensor([1, 4, 0])
    own = x.clone().requires_grad_()
    eager = GatherAttention.apply(own, index, index)  # type: ignore[no-untyped-call]
    expected = eager, torch.autograd.grad(eager.sum(), own)[0]
    assert breaks(lambda: torch.testing.assert_close(gathered(x, index), expected)) == []


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("computed", [False, True], ids=["a parameter", "computed"])
def test_each_argument_has_its_gradient(backend: str, computed: bool) -> None:
    """The gradient of a tensor is the sum of those of its arguments."""
    x, y = (torch.randn(3, requires_grad=True) for _ in range(2))

    def program(x: Tensor, y: Tensor) -> Tensor:
        own = x.sin() if computed else x
        found: Tensor = ProductAttention.apply(own, own) * y + ProductAttention.apply(own, y)  # type: ignore[no-untyped-call]
        return found

    found = torch.autograd.grad(torch.compile(program, backend=backend, fullgraph=True)(x, y).sum(), (x, y))
    torch.testing.assert_close(found, torch.autograd.grad(program(x, y).sum(), (x, y)))


TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "a parameter": lambda x: x,
    "computed": lambda x: x.sin(),
    "transposed": lambda x: x.sin().t(),
    "expanded": lambda x: x[:1].sin().expand(4, 4),
}


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("way", ["is", "leaf", "both", "second", "view", "dirty"])
def test_functions_that_see_whether_arguments_are_one(way: str, tensor: str) -> None:
    """Values, gradients and errors are those without us, and those of the program that is not compiled."""
    value = torch.randn(4, 4, dtype=torch.float64)

    def program(x: Tensor) -> Any:
        own = TENSORS[tensor](x)
        return Forwards.apply(way, own, own)  # type: ignore[no-untyped-call]

    def results(function: Callable[..., Any]) -> Any:
        x = value.clone().requires_grad_()
        try:
            found = function(x)
            found = list(found) if isinstance(found, tuple) else [found]
            weights = [torch.full_like(out, 2.0 + number) for number, out in enumerate(found)]
            return [*(out.detach() for out in found), torch.autograd.grad(found, x, weights)[0]]
        except RuntimeError:
            return None

    found = results(torch.compile(program, backend="aot_eager"))
    torch._dynamo.reset()
    with disabled():
        plain = results(torch.compile(program, backend="aot_eager"))
    assert (found is None) == (plain is None)
    assert all(map(torch.equal, found or [], plain or []))
    if torch.__version__ >= (2, 13):  # those before compute a wrong gradient themselves
        expected = results(program)
        assert (found is None) == (expected is None)
        torch.testing.assert_close(found or [], expected or [])


@pytest.mark.usefixtures("deterministic")
def test_a_function_that_is_no_attention_breaks_the_graph_as_without_us() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    run = torch.compile(lambda x: Forwards.apply("is", x, x), backend="aot_eager")  # type: ignore[no-untyped-call]
    assert breaks(lambda: run(x)) in ([BREAK], [])  # [] with a Dynamo that can trace it


@pytest.mark.usefixtures("deterministic")
def test_without_gradients() -> None:
    x = torch.randn(3, requires_grad=True)
    with torch.no_grad():
        out = torch.compile(lambda t: ProductAttention.apply(t, t), backend="aot_eager", fullgraph=True)(x)  # type: ignore[no-untyped-call]
    assert not out.requires_grad
    torch.testing.assert_close(out, x.detach() ** 2)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("package", "way"), TIED)
def test_query_key_and_value_are_one_tensor(package: str, way: str, dynamic: bool, dtype: torch.dtype) -> None:
    """One graph, in which both directions are replaced; each gradient is the sum of those of the arguments."""
    function, heads = WAYS[way]
    with capture(strict=True) as graphs:
        run = graphs.compile(functools.partial(function, PACKAGES[package]), fullgraph=True, dynamic=dynamic)
        for length in (40, 56) if dynamic else (40,):
            inputs = tensors(*((2, length, n, 16) for n in heads), dtype=dtype)
            found = step(run, inputs)
            exact = fused if package == "door" else PACKAGES[package]  # the door takes no float64
            wide = step(functools.partial(function, exact), [t.detach().double().requires_grad_() for t in inputs])
            for ours, true in zip(found, wide, strict=True):
                allowed = 1e-5 if dtype == torch.float32 else 4e-2
                assert float((ours - true).abs().max()) <= allowed * max(1.0, float(true.abs().max()))
    assert {record.status for record in sites()} == {"replaced"}


@pytest.mark.parametrize("way", ["all", "key and value", "query and value"])
def test_one_tensor_in_a_program_that_is_not_compiled(way: str) -> None:
    function, heads = WAYS[way]
    inputs = tensors(*((2, 40, n, 16) for n in heads))
    found = step(functools.partial(function, flash_attn_func), inputs)
    torch.testing.assert_close(found, step(functools.partial(function, fused), inputs), rtol=1e-4, atol=1e-4)


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
