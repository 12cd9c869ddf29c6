"""Masks that are added to the scores as they are: which tensor the kernels read, and what becomes of its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dash_inductor.graph.nodes import bind, op_name
from dash_inductor.model.attention_spec import AttentionSpec
from dash_inductor.model.reasons import Reason
from dash_inductor.records.records import sites

from ..support.graphs import (
    BACKWARD,
    FORWARD,
    Shape,
    assert_as_exact,
    capture,
    cuda_inputs,
    efficient,
    op_counts,
    rewritten,
    step,
    tensors,
    trace,
)

aten = torch.ops.aten
SHAPE = Shape()
pytestmark = pytest.mark.usefixtures("deterministic")


def site_with(
    bias: Callable[[Tensor], Tensor], size: tuple[int, ...], *, gradient: bool = False, then: Any = None,
    shape: Shape = SHAPE, dtype: torch.dtype = torch.bfloat16,
) -> tuple[Graph, Any]:  # fmt: skip
    """The rewritten graph of a site on CUDA whose mask is made by `bias` of an input of this size."""

    def function(q: Tensor, k: Tensor, v: Tensor, do: Tensor, x: Tensor) -> tuple[Any, ...]:
        out, *gradients = efficient(q, k, v, do, bias=lambda: bias(x), bias_grad=gradient)
        return out, *gradients[:3], *([then(gradients[3])] if gradient else [])

    return rewritten(trace(function, lambda: [*cuda_inputs(shape), torch.empty(size, dtype=dtype, device="cuda")]))


def node_of(graph: Graph, name: str) -> Node:
    (node,) = (node for node in graph.nodes if op_name(node) == name)
    return node


def gradient_of(backward: Node) -> Node:
    (node,) = (user for user in backward.users if user.args[1] == 3)
    return node


def extras_of(graph: Graph, name: str = FORWARD) -> list[Node]:
    found: list[Node] = bind(node_of(graph, name))["extras"]
    return found


def padded(x: Tensor, plane: tuple[int, ...]) -> Tensor:
    """As PyTorch aligns a mask on CUDA: padded, sliced, expanded."""
    length = x.shape[-1]
    return aten.slice(aten.constant_pad_nd(x, [0, 16 - length % 16]), x.dim() - 1, 0, length).expand(plane)


EXPANDED = [((1, 8, 128, 128), 0), ((2, 1, 1, 128), 0), ((2, 8, 128, 128), 0), ((128, 128), 2), ((8, 1, 128), 1)]


@pytest.mark.parametrize(("size", "unsqueezed"), EXPANDED, ids=str)
def test_the_smallest_tensor_is_read(size: tuple[int, ...], unsqueezed: int) -> None:
    graph, record = site_with(lambda x: x.expand(2, 8, 128, 128), size)
    assert record.mask == "full + bias"
    assert record.plan.kernel == record.forward == "portable"
    assert record.detail.startswith("the mask is added as a bias: mask_")
    for name in (FORWARD, BACKWARD):
        (bias,) = extras_of(graph, name)
        for _ in range(unsqueezed):
            assert op_name(bias) == "aten::unsqueeze"
            (bias,) = bias.all_input_nodes
        assert bias.op == "placeholder"
    assert str(AttentionSpec.parse(bind(node_of(graph, BACKWARD))["spec"])).startswith(
        "full/scale=0.125/bias=0/orders="
    )
    assert not op_counts(graph)["aten::expand"]


@pytest.mark.parametrize("length", [100, 101])
def test_padding_for_alignment_is_not_read(length: int) -> None:
    shape = Shape(q_len=length, kv_len=length)
    graph, _ = site_with(lambda x: padded(x, (2, 8, length, length)), (1, 8, length, length), shape=shape)
    (bias,) = extras_of(graph)
    assert bias.op == "placeholder"
    assert not op_counts(graph)["aten::constant_pad_nd"]


@pytest.mark.parametrize(
    "other",
    [
        lambda x: aten.slice(aten.constant_pad_nd(x, [4, 4]), 3, 0, 128),
        lambda x: aten.slice(aten.constant_pad_nd(x, [0, 8]), 3, 8, 136),
        lambda x: aten.slice(aten.constant_pad_nd(x, [0, 0, 0, 8]), 2, 0, 128),
        lambda x: x.neg(),
    ],
)
def test_whatever_else_makes_a_bias_stays(other: Callable[[Tensor], Tensor]) -> None:
    graph, record = site_with(lambda x: other(x).expand(2, 8, 128, 128), (1, 8, 128, 128))
    (bias,) = extras_of(graph)
    assert bias.op == "call_function"
    assert op_name(bias) != "aten::expand"
    assert record.reason is None


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_band_stays_beside_a_bias(is_causal: bool) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, do: Tensor, x: Tensor) -> tuple[Any, ...]:
        return efficient(q, k, v, do, bias=lambda: x, causal=is_causal)

    def inputs() -> list[Tensor]:
        return [*cuda_inputs(Shape()), torch.empty(2, 8, 128, 128, dtype=torch.bfloat16, device="cuda")]

    _, record = rewritten(trace(function, inputs))
    assert record.mask == ("causal + bias" if is_causal else "full + bias")


SUMS: list[tuple[Any, list[int], list[int] | None]] = [
    (lambda g: g.sum(0, keepdim=True), [0], None),
    (lambda g: g.sum(1, keepdim=True), [1], None),
    (lambda g: g.sum([0, 1], keepdim=True), [0, 1], None),
    (lambda g: g.sum([1, 2], keepdim=True), [1], [2]),
    (lambda g: g.sum([0, 2], keepdim=True), [], [0, 2]),  # two batch elements take less memory than a sum in float32
    (lambda g: g.sum([0, 1, 2, 3], keepdim=True), [0, 1], [2, 3]),
    (lambda g: g.sum([-4], keepdim=True), [0], None),
    (lambda g: g, [], None),
    (lambda g: g.sum([2], keepdim=True), [], [2]),
    (lambda g: g.sum(0), [], [0]),
    (lambda g: (g.sum(0, keepdim=True), g), [], [0]),
    (lambda g: g.sum(0, keepdim=True, dtype=torch.float32), [], [0]),
]


@pytest.mark.parametrize(("then", "summed", "rest"), SUMS)
def test_gradients(then: Any, summed: list[int], rest: list[int] | None) -> None:
    """A sum over batch elements or heads is the operator's; what else the graph does with the gradient stays."""
    outputs: list[Tensor] = []

    def remember(gradient: Tensor) -> Any:
        result = then(gradient)
        outputs.extend(result if isinstance(result, tuple) else (result,))
        return result

    graph, record = site_with(lambda x: x, (2, 8, 128, 128), gradient=True, then=remember)
    assert record.reason is None
    assert record.detail == "the mask is added as a bias: bias_gradient"
    node = node_of(graph, BACKWARD)
    assert f"/bias=0+gradient{''.join(map(str, summed))}/" in bind(node)["spec"]
    size = gradient_of(node).meta["val"].shape
    assert list(size) == [1 if d in summed else n for d, n in enumerate((2, 8, 128, 128))]
    sums = [bind(n)["dim"] for n in graph.nodes if op_name(n) == "aten::sum"]
    assert sums == ([] if rest is None else [rest])
    found = [n.meta["val"] for n in graph.output_node().all_input_nodes]
    assert [(t.shape, t.dtype) for t in outputs] == [(t.shape, t.dtype) for t in found[4:]]


def test_an_unused_gradient_is_none() -> None:
    graph, record = site_with(lambda x: x, (2, 8, 128, 128), gradient=True, then=lambda gradient: None)
    assert record.detail.startswith("the mask is added as a bias: mask_depends_on_input")
    assert "gradient" not in bind(node_of(graph, BACKWARD))["spec"]


@pytest.mark.parametrize("dims", [(192, 128), (256, 256)], ids=str)
def test_wide_heads(dims: tuple[int, int]) -> None:
    _, record = site_with(lambda x: x, (2, 8, 128, 128), shape=Shape(head_dim=dims[0], value_dim=dims[1]))
    assert (record.status, record.mask) == ("replaced", "full + bias")


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("kind", ["infinite", "lowest", "any"])
@pytest.mark.parametrize("size", [(40, 56), (2, 1, 40, 56), (1, 4, 40, 56), (2, 1, 1, 56)], ids=str)
def test_a_mask_that_is_an_input(kind: str, size: tuple[int, ...]) -> None:
    """If Dynamo cuts a model, as it does for DDP, the mask of all layers is an input of most graphs."""
    hidden = torch.rand(size, generator=torch.Generator().manual_seed(2)) < 0.4
    hidden[..., 3 % size[-2], :] |= size[-2] > 1  # all keys of one query
    low = float("-inf") if kind == "infinite" else torch.finfo(torch.float32).min
    mask = torch.randn(size) if kind == "any" else torch.zeros(size).masked_fill(hidden, low)
    inputs = tensors((2, 4, 40, 16), (2, 4, 56, 16), (2, 4, 56, 16))
    with capture() as graphs:
        results = step(lambda *qkv: graphs.compile(attend)(*qkv, mask), inputs)
    assert graphs.count(FORWARD) == graphs.count(BACKWARD) == 1
    (record,) = sites()
    assert record.mask == "full + bias"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert_as_exact(lambda *qkv: attend(*qkv, mask.to(qkv[0].dtype)), inputs, results, strides=False)


def test_alibi() -> None:
    """Slopes times distances, masked: a table of all pairs of each head."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(q.shape[2])
        distance = place[None] - place[:, None]
        slopes = 2.0 ** -torch.arange(1, 5)
        bias = (slopes[:, None, None] * distance)[None]
        return attend(q, k, v, bias.masked_fill(distance > 0, float("-inf")).to(q.dtype))

    inputs = tensors(*[(2, 4, 40, 16)] * 3)
    with capture() as graphs:
        results = step(graphs.compile(model), inputs)
    assert graphs.count(BACKWARD) == 1
    assert [record.mask for record in sites()] == ["full + bias"]
    assert_as_exact(model, inputs, results, strides=False)


def test_dynamic_lengths() -> None:
    inputs = tensors(*[(2, 4, 40, 16)] * 3)
    for t in inputs:
        torch._dynamo.mark_dynamic(t, 2)
    mask = torch.randn(1, 4, 40, 40)
    torch._dynamo.mark_dynamic(mask, 2)
    torch._dynamo.mark_dynamic(mask, 3)
    with capture() as graphs:
        results = step(lambda *qkv: graphs.compile(attend)(*qkv, mask), inputs)
    assert graphs.count(BACKWARD) == 1
    assert_as_exact(lambda *qkv: attend(*qkv, mask.to(qkv[0].dtype)), inputs, results, strides=False)


@pytest.mark.parametrize("gradient", [False, True], ids=["constant", "learned"])
def test_heads_that_are_not_known_are_the_reason(gradient: bool) -> None:
    """The reason is not that the bias has a gradient, or what it is made of."""

    def function(q: Tensor, k: Tensor, v: Tensor, do: Tensor, x: Tensor) -> tuple[Any, ...]:
        return efficient(q, k, v, do, bias=lambda: x, bias_grad=gradient)

    size = [1, 8, 128, 128]
    module = trace(function, lambda: [*cuda_inputs(SHAPE), torch.empty(size, dtype=torch.bfloat16, device="cuda")])
    *_, bias = (node for node in module.graph.nodes if node.op == "placeholder")
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        assert mode.shape_env is not None
        size[1] = mode.shape_env.create_unbacked_symint()  # type: ignore[call-overload]
        bias.meta["val"] = torch.empty(size, dtype=torch.bfloat16, device="cuda")
    _, record = rewritten(module)
    assert record.reason is Reason.DYNAMIC_DIMS
    sizes = "the mask has the sizes [1, u0, 128, 128], the scores [2, 8, 128, 128]"
    assert record.detail == f"{sizes}: whether these are the same is not known"


def test_a_bias_that_is_none_keeps_the_reason() -> None:
    _, record = site_with(lambda x: x, (2, 4, 128, 128), gradient=True, then=lambda gradient: gradient)
    assert record.reason is Reason.BIAS_GRADIENT
