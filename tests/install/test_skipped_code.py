"""Attention that a compiled function calls under `torch.compiler.disable`: a record, and an error under `strict`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dash_inductor import disabled
from dash_inductor.config import config
from dash_inductor.errors import FallbackError
from dash_inductor.install.skipped_code import computes_attention
from dash_inductor.model.reasons import Reason
from dash_inductor.records.records import sites

from ..support.processes import run_python

pytestmark = pytest.mark.usefixtures("deterministic")


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Stands for FlashAttention-4's function, which Dynamo cannot trace."""
    return F.scaled_dot_product_attention(q, k, v)


@torch.compiler.disable
def kernel(q: Tensor) -> Tensor:
    return flash_attn_varlen_func(q, q, q)


@torch.compiler.disable
def attention_mask_statistics(q: Tensor) -> Tensor:
    """It has the word in its name, but computes none."""
    return q.mean()


class Attention(nn.Module):
    @torch.compiler.disable
    def forward(self, q: Tensor) -> Tensor:
        return q * 2


MODULE = Attention()


class FlashAttnFunc(torch.autograd.Function):
    """Stands for an autograd function in which Dynamo comes to what it cannot trace, in one of two directions."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, breaks: str) -> Tensor:
        ctx.breaks = breaks
        if breaks == "forward":
            torch._dynamo.graph_break()
        return q * 2

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.breaks == "backward":
            torch._dynamo.graph_break()
        return dout * 2, None


class LayerNormFn(FlashAttnFunc):
    """What else a package of attention has."""


LayerNormFn.__module__ = "flash_attn.ops.triton.layer_norm"


def called(function: Any, q: Tensor, breaks: str) -> Tensor:
    found: Tensor = function.apply(q + 1, breaks)
    return found * 2


def by_function(q: Tensor) -> Tensor:
    return kernel(q + 1) * 2


def by_module(q: Tensor) -> Tensor:
    found: Tensor = MODULE(q + 1)
    return found


def compiled(function: Callable[[Tensor], Tensor]) -> Any:
    torch._dynamo.reset()
    q = torch.randn(1, 2, 16, 8, requires_grad=True)
    with config.patch(cpu="reference"):
        return torch.compile(function)(q)


@pytest.mark.parametrize(("function", "named"), [(by_function, "kernel"), (by_module, "Attention.forward")])
def test_skipped_attention_has_a_record(function: Callable[[Tensor], Tensor], named: str) -> None:
    compiled(function)
    (record,) = [site for site in sites() if site.reason is Reason.SKIPPED]
    assert f".{named}" in record.detail
    assert "is under torch.compiler.disable" in record.detail
    assert record.line.partition(":")[0] == __file__
    assert ("which calls flash_attn_varlen_func" in record.detail) == (named == "kernel")


def test_strict_does_not_pass() -> None:
    with config.patch(strict=True), pytest.raises(FallbackError, match=r"skipped: .*kernel, which calls flash_attn"):
        compiled(by_function)


@pytest.mark.parametrize("breaks", ["forward", "backward"])
def test_an_autograd_function_that_breaks_the_graph_has_a_record(breaks: str) -> None:
    """One, though Dynamo comes to it again in each function around it."""

    def outer(q: Tensor) -> Tensor:
        return called(FlashAttnFunc, q, breaks) + 1

    compiled(outer)
    (record,) = [site for site in sites() if site.reason is Reason.SKIPPED]
    assert record.detail.startswith(
        f"{__name__}.FlashAttnFunc, breaks the graph: Call to `torch._dynamo.graph_break()`"
    )
    assert record.line.partition(":")[0] == __file__
    with config.patch(strict=True), pytest.raises(FallbackError, match=r"FlashAttnFunc, breaks the graph"):
        compiled(outer)


@pytest.mark.parametrize(("function", "breaks"), [(FlashAttnFunc, "no"), (LayerNormFn, "forward")])
def test_other_autograd_functions_have_no_record(function: Any, breaks: str) -> None:
    """Neither one that is traced, nor one of a package with attention that computes none."""
    with config.patch(strict=True):
        compiled(lambda q: called(function, q, breaks))
    assert not sites()


def test_other_skipped_functions_have_no_record() -> None:
    with config.patch(strict=True):
        compiled(lambda q: attention_mask_statistics(q) * q)
    assert not sites()


def test_nothing_is_recorded_while_it_is_off() -> None:
    with disabled():
        compiled(by_function)
    assert not sites()


def test_the_cpu_is_left_alone_by_default() -> None:
    torch._dynamo.reset()
    with config.patch(strict=True):
        torch.compile(by_function)(torch.randn(1, 2, 16, 8))
    assert not sites()


def test_names() -> None:
    assert computes_attention(kernel) == "flash_attn_varlen_func"
    assert computes_attention(attention_mask_statistics) == ""
    assert computes_attention(F.scaled_dot_product_attention) == ""
    assert computes_attention(len) == ""


FUNCTION = "attention = torch.compiler.disable(lambda q: flash_attn_func(q))"
METHOD = "attention = type('Attention', (), {'forward': torch.compiler.disable(forward)})().forward"


@pytest.mark.parametrize("attention", [FUNCTION, METHOD])
def test_the_first_thing_that_a_process_compiles(attention: str) -> None:
    """Dynamo may come to the call before anything has imported Inductor."""
    program = f"""
import torch, dash_inductor
torch.use_deterministic_algorithms(True)
dash_inductor.config.cpu = "reference"

def flash_attn_func(q):
    return q * 2

def forward(self, q):
    return flash_attn_func(q)

forward.__qualname__ = "Attention.forward"
{attention}
torch.compile(lambda q: attention(q) + 1)(torch.ones(2, 2))
print([site.reason.value for site in dash_inductor.sites()])
"""
    assert "['skipped']" in run_python(program).stdout
