"""Detects attention operators that no frontend supports, by operator name, argument names and shapes.

They are not replaced, but recorded, so that no attention stays non-deterministic silently.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from ..graph import sizes
from ..graph.model_line import model_line
from ..graph.nodes import bind, called, op_name
from ..model.plan import Fallback
from ..model.reasons import Reason
from .attention import OURS, Refusal, tensors_of
from .written import given

_ATTENTION, _BACKWARD = re.compile("attn|attention", re.IGNORECASE), re.compile("bwd|backward", re.IGNORECASE)
_NAMES = ("query", "key", "value"), ("q", "k", "v")
_GRADIENTS = {"do", "dout", "d_out", "dO", "grad_out", "grad_output", "grad"}
_LOGSUMEXPS = {"lse", "softmax_lse", "logsumexp", "log_sum_exp", "L", "M"}
"""Argument names that identify a backward whose operator name does not: it reads query, key and value, an argument of
`_GRADIENTS` and one of these."""

_WORD = re.compile(
    r"attn|attention|(?<![a-z])(sdpa|mha|mqa|gqa|mla|fmha|flash|flashmla|flashinfer)(?![a-z])", re.IGNORECASE
)
"""Matches operator names that denote attention."""
_BESIDE = re.compile(
    "norm|rope|rotary|mask|bias|cache|metadata|plan|schedule|quant|slope|alibi|padd?ing", re.IGNORECASE
)
"""Matches operator names that serve attention but do not compute it."""
_OF_MODULE = re.compile(r"attn|attention", re.IGNORECASE)
_PYTORCH = frozenset({
    "aten", "prims", "prim", "inductor", "inductor_prims", "rngprims", "higher_order", "_c10d_functional",
    "_c10d_functional_autograd", "c10d", "c10d_functional", "symm_mem", "_dtensor", "torchvision", "quantized",
    "quantized_decomposed", "dash_inductor", "profiler", "debugprims", "mkldnn", "onednn", "streams", "fsdp",
})  # fmt: skip
"""Namespaces whose attention operators are all known to the frontends."""


def find(graph: Graph, known: Set[Node]) -> Iterator[Refusal]:
    """Yield a refusal for each attention of a graph that no frontend supports, found by name, arguments or shapes.

    A forward whose backward is in the graph has no refusal of its own.

    Args:
        graph: the graph.
        known: the nodes of attentions that frontends have found; they are skipped.
    """
    backwards = [node for node in graph.nodes if node not in known and _is_backward(node)]
    for node in backwards:
        yield _refusal(node, op_name(node), has_backward=True)
    ours = [node for node in graph.nodes if op_name(node) == OURS]  # an earlier pass did not replace their forwards
    read = {_source(source) for node in (*backwards, *known, *ours) for source in node.all_input_nodes}
    for node in graph.nodes:
        if node in known or not _is_forward(node):
            continue
        shared = sum(_source(source) in read for source in node.all_input_nodes)
        if shared < 3 and node not in read and read.isdisjoint(node.users):
            yield _refusal(node, f"unknown operator: {op_name(node)}", has_backward=False)


def _refusal(node: Node, detail: str, *, has_backward: bool) -> Refusal:
    fallback = Fallback(Reason.UNSUPPORTED_OP, detail)
    return Refusal(node, op_name(node), fallback, has_backward, tensors_of(_operands(node)))


def _is_backward(node: Node) -> bool:
    name = op_name(node)
    if not name or name == OURS:
        return False
    by_name = bool(_ATTENTION.search(name) and _BACKWARD.search(name))
    return by_name or _reads_of_backward(node)


def _reads_of_backward(node: Node) -> bool:
    names = _arguments(node)
    return _reads_qkv(names) and not names.isdisjoint(_GRADIENTS) and not names.isdisjoint(_LOGSUMEXPS)


def _is_forward(node: Node) -> bool:
    """Return whether an operator outside PyTorch's own namespaces computes attention.

    The evidence is its name, its argument names, the module that calls it, or shapes that only attention has.  A name
    that mentions a norm, a rotation, a cache or the like rules it out.
    """
    namespace, _, name = op_name(node).partition("::")
    operator = called(node)
    if operator is None or namespace in _PYTORCH or _BESIDE.search(name) or _BACKWARD.search(name):
        return False
    if _WORD.search(name) or _reads_qkv(_arguments(node)):
        return bool(_tensors(node))
    length_of_keys = _by_shapes(node)
    in_attention = bool(_OF_MODULE.search(model_line([node])[1]))
    return length_of_keys is not None and (in_attention or length_of_keys)


def _by_shapes(node: Node) -> bool | None:
    """Return whether the shapes are [.., L, D], [.., S, D], [.., S, Dv] -> [.., L, Dv] with L != S.

    Return False if L equals S, because elementwise operators have these shapes too, and None for other shapes.
    """
    found, result = _tensors(node), node.meta.get("val")
    result = result[0] if isinstance(result, (tuple, list)) and result else result
    if len(found) < 3 or not isinstance(result, Tensor):
        return None
    query, key, value = (tensor.shape for tensor in found[:3])
    if not len(query) == len(key) == len(value) == result.dim() >= 3:
        return None
    fits = (
        sizes.same(query[-1], key[-1])
        and sizes.same(key[-2], value[-2])
        and sizes.same_all(result.shape, (*query[:-1], value[-1]))
    )
    return not sizes.same(query[-2], key[-2]) if fits else None


def _tensors(node: Node) -> Sequence[Tensor]:
    """Return the float tensors among an operator's arguments, in order."""
    values = [source.meta.get("val") for source in node.all_input_nodes]
    return [value for value in values if isinstance(value, Tensor) and value.dtype.is_floating_point]


def _reads_qkv(names: Set[str]) -> bool:
    return any(names >= set(qkv) for qkv in _NAMES)


def _source(node: Node) -> Node:
    """Return the node of which `node` is a copy or a view, through any number of them."""
    while op_name(node) in ("aten::clone", "aten::alias", "aten::detach", "aten::view", "aten::permute"):
        (node, *_) = node.all_input_nodes
    return node


def _operands(node: Node) -> list[Any]:
    """Return query, key and value if the operator's arguments have these names; else an empty list."""
    names = next((qkv for qkv in _NAMES if _arguments(node) >= set(qkv)), ())
    arguments = bind(node) if names else {}
    return [arguments.get(name) or given(node, name) for name in names]


def _arguments(node: Node) -> Set[str]:
    """Return the names of an operator's arguments; empty for higher-order operators."""
    operator = called(node)
    return set() if operator is None else {argument.name for argument in operator._schema.arguments}
