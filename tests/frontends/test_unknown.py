"""No attention is without a record: backwards that no entry knows, by their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.fx import Graph

from dash_inductor.frontends.all import attentions
from dash_inductor.graph.nodes import op_name
from dash_inductor.model.reasons import Reason
from dash_inductor.records.records import FORWARD_ONLY, FULL, sites

from ..support.graphs import Shape, capture, flash, joint_graph, rewrite_on, rewritten, step, tensors, trace

pytestmark = pytest.mark.usefixtures("deterministic")


@torch.library.custom_op("some_library::fused_attn_fwd", mutates_args=())
def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q * k * v


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("some_library::fused_attn_bwd", mutates_args=())
def backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return do * k * v, do * q * v, do * q * k


@backward.register_fake
def _(do: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@torch.library.custom_op("my_attention::bwd", mutates_args=("dq", "dk", "dv"))
def into(do: Tensor, a: Tensor, b: Tensor, c: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    for written, values in zip((dq, dk, dv), (do * b * c, do * a * c, do * a * b), strict=True):
        written.copy_(values)


HUB = torch.library.Library("_flash_attn2_0a1b2c3", "DEF")
HUB.define(
    "varlen_bwd(Tensor(a!) dout, Tensor(b!) q, Tensor(c!) k, Tensor(d!) v, Tensor(e!) out, Tensor(f!) softmax_lse, "
    "Tensor? dq_, Tensor? dk_, Tensor? dv_, Tensor cu_seqlens_q, float softmax_scale) -> (Tensor, Tensor, Tensor)"
)


@torch.library.impl(HUB, "varlen_bwd", "CompositeExplicitAutograd")
def hub_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: object) -> tuple[Tensor, ...]:
    return dout * k * v, dout * q * v, dout * q * k


@torch.library.custom_op("mine::gradients", mutates_args=())
def by_arguments(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return grad_out * key * value, grad_out * query * value, grad_out * query * key


@by_arguments.register_fake
def _(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        found: Tensor = forward(q, k, v)
        return found

    @staticmethod
    def backward(ctx, do: Tensor):
        return backward(do, *ctx.saved_tensors)


class Into(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        found: Tensor = forward(q, k, v)
        return found

    @staticmethod
    def backward(ctx, do: Tensor):
        gradients = [torch.empty_like(t) for t in ctx.saved_tensors]
        into(do, *ctx.saved_tensors, *gradients)
        return tuple(gradients)


class Hub(Plain):
    """The extension of flash-attn 2 as the kernels hub declares it: it writes to what it reads, says its schema."""

    @staticmethod
    def backward(ctx, do: Tensor):
        q, k, v = (t.clone() for t in ctx.saved_tensors)
        starts = torch.zeros(2, dtype=torch.int32)
        lse = torch.zeros(4)
        saved = do.clone(), q, k, v, q.clone(), lse
        return torch.ops._flash_attn2_0a1b2c3.varlen_bwd(*saved, None, None, None, starts, 0.5)


class ByArguments(Plain):
    @staticmethod
    def backward(ctx, do: Tensor):
        return by_arguments(do, *ctx.saved_tensors, torch.zeros(4))


@torch.compiler.nested_compile_region
def region(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    found: Tensor = Plain.apply(q, k, v)
    return found


class InARegion:
    """Inside of a higher-order operator."""

    apply = staticmethod(region)


@pytest.mark.parametrize(
    ("function", "name", "shape"),
    [
        (Hub, "_flash_attn2_0a1b2c3::varlen_bwd", "q, k and v 2x4x40x16, float32"),
        (ByArguments, "mine::gradients", "q, k and v 2x4x40x16, float32"),
        (InARegion, "some_library::fused_attn_bwd", "q, k and v 2x4x40x16, float32"),
        (Plain, "some_library::fused_attn_bwd", "q, k and v 2x4x40x16, float32"),
        (Into, "my_attention::bwd", ""),
    ],
)
def test_operators(function: Any, name: str, shape: str) -> None:
    """Also one that writes to its arguments, which a graph has as a higher-order operator."""
    with capture() as graphs:
        step(graphs.compile(function.apply), tensors(*[(2, 4, 40, 16)] * 3))
    (record,) = sites()
    assert (record.op, record.status, record.reason) == (name, "fallback", Reason.UNSUPPORTED_OP)
    assert (record.detail, record.kind, record.shape) == (name, FULL, shape)


def test_higher_order_operators() -> None:
    class Unknown(HigherOrderOperator):
        def __init__(self) -> None:
            super().__init__("tiled_attention_backward")

        def __call__(self, *args: Tensor) -> Tensor:
            return super().__call__(*args)

    module = trace(lambda t: torch.ops.aten.sin(t), lambda: [torch.empty(4, device="cuda")])
    (sin,) = (node for node in module.graph.nodes if op_name(node) == "aten::sin")
    sin.target = Unknown()
    _, record = rewritten(module)
    assert (record.op, record.reason) == ("tiled_attention_backward", Reason.UNSUPPORTED_OP)


def test_what_an_entry_knows_is_found_once() -> None:
    """Neither twice, nor again when it has become an operator of ours."""
    graph: Graph = joint_graph(flash, Shape()).graph
    assert len(list(attentions(graph))) == 1
    rewrite_on(graph)
    assert [record.status for record in sites()] == ["replaced"]
    assert list(attentions(graph)) == []


def test_a_forward_alone() -> None:
    with capture() as graphs, torch.no_grad():
        graphs.compile(lambda q: forward(q, q, q))(torch.randn(2, 4, 40, 16))
    (record,) = sites()
    assert (record.op, record.status, record.reason) == (
        "some_library::fused_attn_fwd",
        "fallback",
        Reason.UNSUPPORTED_OP,
    )
    assert (record.detail, record.kind) == ("unknown operator: some_library::fused_attn_fwd", FORWARD_ONLY)


QKV = [(2, 4, 40, 16)] * 3
CROSS = [(2, 4, 40, 16), (2, 4, 24, 16), (2, 4, 24, 16)]
LIBRARY = torch.library.Library("a_library", "DEF")


class SelfAttention(torch.nn.Module):
    def forward(self, operator: Any, *given: Tensor) -> Tensor:
        found: Tensor = operator(*given)
        return found


class Layer(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, SelfAttention())
        self.name = name

    def forward(self, *given: Any) -> Tensor:
        found: Tensor = getattr(self, self.name)(*given)
        return found


@pytest.mark.parametrize("graph_kind", ["inference", "training"])
@pytest.mark.parametrize(
    ("name", "arguments", "shapes", "module", "expected"),
    [
        ("sage_attn", "a b c", QKV, "block", True),
        ("run_flash", "a b c", QKV, "block", True),
        ("unified_attention", "x w", QKV[:2], "block", True),
        ("mla_decode", "a b", QKV[:2], "block", True),
        ("fused", "q k v", QKV, "block", True),
        ("fused", "query key value scale", [*QKV, (1,)], "block", True),
        ("fused", "a b c", CROSS, "block", True),
        ("fused", "a b c", QKV, "self_attn", True),
        ("fused", "a b c", QKV, "block", False),
        ("fused", "a b c", [(40, 16), (24, 16), (24, 16)], "self_attn", False),  # a layer of two weights
        ("flashy", "a b", QKV[:2], "block", False),
        ("layer_norm", "x weight bias", [(2, 40, 16), (16,), (16,)], "self_attn", False),
        ("apply_rotary", "q k cos sin", [*QKV, (2, 4, 40, 16)], "self_attn", False),
        ("rope_attn", "q k v", QKV, "self_attn", False),
        ("attn_norm", "q k v", QKV, "self_attn", False),
        ("reshape_and_cache", "key value slots", QKV, "self_attn", False),
        ("silu_mul", "gate up", QKV[:2], "block", False),
        ("scan", "x dt a b", [(2, 40, 16)] * 4, "mixer", False),
    ],
)
def test_forwards(
    name: str, arguments: str, shapes: Any, module: str, expected: bool, graph_kind: str, request: Any
) -> None:
    """By the words of names, the names of arguments, shapes, and the modules that call them."""
    own = f"{name}_{abs(hash(request.node.callspec.id)) % 1000000007}x"
    made = f"{own}({', '.join(f'Tensor {each}' for each in arguments.split())}) -> Tensor"
    LIBRARY.define(made)
    torch.library.impl(LIBRARY, own, "CompositeExplicitAutograd")(lambda *given: given[0].clone())
    torch.library.register_fake(f"a_library::{own}", lambda *given: torch.empty_like(given[0]), lib=LIBRARY)
    operator = getattr(torch.ops.a_library, own)
    given = [torch.randn(shape) for shape in shapes]
    weight = torch.randn(16, requires_grad=graph_kind == "training")
    layer = Layer(module)
    with capture() as graphs, torch.set_grad_enabled(graph_kind == "training"):
        graphs.compile(lambda *given: (layer(operator, *given) * weight).sum())(*given)
    assert [record.op for record in sites()] == ([f"a_library::{own}"] if expected else [])
