"""Attention that PyTorch computes without a fused operator: matrix products around ``aten::_safe_softmax``.

Only PyTorch's own math implementation of `scaled_dot_product_attention` calls ``_safe_softmax``; a softmax that a model
writes by hand is ``_softmax``.  The operator is decomposed before a joint graph is made, but its nodes keep its name
(`original_aten`), and all nodes of one call its autograd sequence number, those of the backward too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..observe.records import Tensors
from . import layout
from .attention_ops import op_name

OP = "aten::_scaled_dot_product_attention_math"
_PRODUCTS = ("aten::bmm", "aten::matmul", "aten::baddbmm")


@dataclass(frozen=True)
class MathCall:
    """One call of `scaled_dot_product_attention`.

    Attributes:
        softmax: the nodes of its softmax.
        device: where it runs.
        detail: what can be seen of the call; the cause is among it.
        has_backward: whether its backward is in the graph, too.
        tensors: its query, key and value, heads repeated as PyTorch repeated them; None where they cannot be read.
    """

    softmax: tuple[Node, ...]
    device: torch.device
    detail: str
    has_backward: bool
    tensors: Tensors | None


def math_calls(graph: Graph) -> Iterator[MathCall]:
    """Every call of the math implementation in this graph."""
    softmax: dict[object, list[Node]] = {}
    forward: dict[object, list[Node]] = {}
    with_backward: set[object] = set()
    for node in graph.nodes:
        number = node.meta.get("seq_nr")
        if _aten(node) == "aten::_safe_softmax":
            softmax.setdefault(number, []).append(node)
        if _aten(node) == "aten::_softmax_backward_data":
            with_backward.add(number)
        forward.setdefault(_call(node, "source_fn_stack"), []).append(node)
        with_backward.add(_call(node, "fwd_source_fn_stack"))
    for number, nodes in softmax.items():
        call = _call(nodes[0], "source_fn_stack")
        value = nodes[0].meta.get("val")
        if isinstance(value, Tensor):
            same = nodes if call is None else forward[call]
            has_backward = number in with_backward or (call is not None and call in with_backward)
            yield MathCall(
                tuple(nodes),
                value.device,
                "; ".join(_facts(value, same)),
                has_backward,
                _tensors(nodes[-1].meta["val"], same),
            )


def _facts(scores: Tensor, nodes: Iterable[Node]) -> Iterator[str]:
    """What keeps PyTorch from its fused operators, as far as the decomposed call shows it."""
    nodes = list(nodes)
    names = {_aten(node) for node in nodes}
    factors = _factors(nodes)
    yield f"{str(scores.dtype).removeprefix('torch.')} on {scores.device.type}"
    if scores.dim() != 4 and not any(name.endswith("view") for name in names):
        yield f"{scores.dim()} dimensions instead of 4"
    if "aten::native_dropout" in names:
        yield "dropout"
    if names & {"aten::add", "aten::where", "aten::masked_fill"}:
        yield "a mask"
    if names & {"aten::repeat_interleave", "aten::unsqueeze"}:
        yield "grouped heads"
    if factors is not None:
        head_dim, value_dim = (factor.shape[-1] for factor in factors)
        if head_dim != value_dim:
            yield f"head dimension {head_dim}, of value {value_dim}"


def _factors(nodes: Iterable[Node]) -> tuple[Tensor, Tensor] | None:
    """Query and value as they are multiplied, where the two products of the call can be told."""
    products = [node.all_input_nodes for node in nodes if _aten(node) in _PRODUCTS]
    if [len(factors) for factors in products] != [2, 2]:
        return None
    (query, _), (_, value) = products
    return query.meta["val"], value.meta["val"]


def _tensors(probabilities: Tensor, nodes: Iterable[Node]) -> Tensors | None:
    factors = _factors(nodes)
    if factors is None or probabilities.dim() != 4:
        return None
    query, value = factors
    sizes = (*probabilities.shape, query.shape[-1], value.shape[-1])
    batch, heads, q_len, kv_len, head_dim, value_dim = map(layout.static, sizes)
    return Tensors(
        query=(batch, heads, q_len, head_dim),
        key=(batch, heads, kv_len, head_dim),
        value=(batch, heads, kv_len, value_dim),
        dtype=str(query.dtype).removeprefix("torch."),
        device=str(query.device),
    )


def _aten(node: Node) -> str:
    """The operator before decomposition, else the one that the node calls."""
    original = node.meta.get("original_aten")
    return original._schema.name if isinstance(original, torch._ops.OpOverload) else op_name(node)


def _call(node: Node, kind: str) -> tuple[str, ...] | None:
    """Names of the calls in Dynamo's graph from which a node comes, from the outside in; None if it has none."""
    stack = node.meta.get(kind)
    return tuple(name for name, _ in stack) if stack else None
