"""Finds SDPA calls that PyTorch computed by its math backend: matrix products around ``aten::_safe_softmax``.

Only the math backend of `scaled_dot_product_attention` calls ``_safe_softmax``, and so does the softcap attention that
this package offers to programs that are not compiled; a softmax in a model is ``_softmax``.  The operator is decomposed
before a joint graph is traced, but its nodes keep its name (`original_aten`), and all nodes of one call, including its
backward, share an autograd sequence number.  Other nodes that the nodes of a call read are its arguments, as the
program passed them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Graph, Node

from ..graph import backward, sizes
from ..graph.nodes import op_name
from ..model.plan import Fallback
from ..model.reasons import Reason
from ..records.records import Tensors
from ..upstream.dispatch import OpOverload
from .attention import Found, Refusal
from .fusable import CALLS

OP = "aten::_scaled_dot_product_attention_math"
_PRODUCTS = ("aten::bmm", "aten::matmul", "aten::baddbmm")
_MASKED = ("aten::add", "aten::where", "aten::masked_fill")


def find(graph: Graph) -> Iterator[Found]:
    """Yield a refusal for every call of SDPA's math backend in a graph; implements `Frontend`.

    The detail of a refusal says with which tensors SDPA was called, and which conditions of its fused operators the
    call does not meet.
    """
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
    of_backward = backward.of_backward(graph) if softmax else frozenset()
    for number, nodes in softmax.items():
        call = _call(nodes[0], "source_fn_stack")
        value = nodes[0].meta.get("val")
        if isinstance(value, Tensor):
            same = nodes if call is None else forward[call]
            by_name = number in with_backward or (call is not None and call in with_backward)
            has_backward = by_name or backward.has_backward(nodes, of_backward)
            yield _refusal(nodes, value, same, has_backward)


def _refusal(softmax: Sequence[Node], scores: Tensor, nodes: Sequence[Node], has_backward: bool) -> Refusal:
    """Return the refusal of a call, given the nodes of its softmax and all nodes known to belong to the call."""
    found = _arguments(nodes)
    if found is None:
        detail, tensors = _little_known(scores, nodes), None
    else:
        causes = list(_causes(scores.device.type == "cpu", found)) or [_without_a_cause(found)]
        detail, tensors = "; ".join([*causes, str(found)]), found.tensors
    return Refusal(
        softmax[0],
        OP,
        Fallback(Reason.MATH_PATH, detail),
        has_backward,
        tensors,
        place=softmax[0],
        everywhere=True,
        of_line=tuple(softmax),
    )


@dataclass(frozen=True)
class _Arguments:
    """The arguments of a call, as far as the graph shows them; `dropout` is whether it has any."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: bool

    @property
    def tensors(self) -> Tensors:
        query, key, value = (tuple(map(sizes.static, t.shape)) for t in (self.query, self.key, self.value))
        return Tensors(query, key, value, _type(self.query), str(self.query.device))

    def __str__(self) -> str:
        named = [("query", self.query), ("key", self.key), ("value", self.value), ("mask", self.mask)]
        return "called with " + ", ".join(f"{name} {_in_words(t)}" for name, t in named if t is not None)


def _little_known(scores: Tensor, nodes: Sequence[Node]) -> str:
    """Describe a call inside another function, whose arguments the graph does not show."""
    dropout = "dropout; " if _drops(nodes) else ""
    return f"{dropout}its arguments cannot be told; its scores are {_in_words(scores)}"


def _causes(on_cpu: bool, found: _Arguments) -> Iterator[str]:
    """Yield the conditions of PyTorch's fused operators that a call does not meet (``sdp_utils.cpp``)."""
    query, key, value, mask = found.query, found.key, found.value, found.mask
    types = [_type(tensor) for tensor in (query, key, value)]
    if len(set(types)) > 1:
        yield f"query, key and value are of different types: {', '.join(types)}"
    elif types[0] == "float64" and not on_cpu:
        yield "float64 has no fused operator on cuda"
    other_than_4 = next((tensor.dim() for tensor in (query, key, value) if tensor.dim() != 4), None)
    if other_than_4 is not None:
        yield f"{other_than_4} dimensions instead of 4: make all in front of the heads one, those of the mask too"
        return
    if found.dropout and on_cpu:
        yield "dropout, which the fused operator of the CPU does not have"
    if not sizes.same(query.shape[1], key.shape[1]) and (mask is not None or on_cpu):
        heads = f"grouped heads, {query.shape[1]} of query and {key.shape[1]} of key"
        yield f"{heads}, beside a mask: repeat key and value" if mask is not None else heads
    if on_cpu and not sizes.same(query.shape[3], value.shape[3]):
        yield f"head dimension {query.shape[3]}, of value {value.shape[3]}"
    for name, tensor in (("query", query), ("key", key), ("value", value), ("mask", mask)):
        if tensor is None or (name == "mask" and on_cpu) or not tensor.dim():
            continue
        stride = sizes.static(tensor.stride(-1))
        if stride != 1:
            yield f"the {name} is not contiguous in its last dimension, whose stride is {stride}: call .contiguous()"
    if on_cpu and mask is not None and mask.dim() not in (2, 4):
        yield f"a mask of {mask.dim()} dimensions: the fused operator of the CPU takes 2 or 4"


def _without_a_cause(found: _Arguments) -> str:
    """Describe the remaining causes if no condition fails: graphs do not show which tensors need a gradient."""
    if found.query.device.type == "cpu" and found.mask is not None and found.mask.dtype.is_floating_point:
        return "a mask that needs a gradient, which the fused operator of the CPU does not give, or SDPBackend.MATH"
    return "no condition of a fused operator is seen to fail: a program that uses SDPBackend.MATH has asked for it"


def _arguments(nodes: Sequence[Node]) -> _Arguments | None:
    """Return the arguments of the call that these nodes compute.

    Return None if the nodes do not come from an SDPA call in Dynamo's graph, or its two products are ambiguous.
    """
    of_call = frozenset(nodes)
    stack = nodes[0].meta.get("source_fn_stack")
    products = [node.all_input_nodes for node in nodes if _aten(node) in _PRODUCTS]
    if not stack or stack[-1][1] not in CALLS or [len(factors) for factors in products] != [2, 2]:
        return None
    (query, key), (_, value) = products
    masks = [node.all_input_nodes[-1] for node in nodes if _aten(node) in _MASKED]
    found = [_passed(node, of_call) for node in (query, key, value, *masks[-1:])]
    if any(node is None for node in found):
        return None
    tensors = [node.meta["val"] for node in found if node is not None]
    return _Arguments(tensors[0], tensors[1], tensors[2], tensors[3] if masks else None, _drops(nodes))


def _drops(nodes: Sequence[Node]) -> bool:
    return any(_aten(node) == "aten::native_dropout" for node in nodes)


def _passed(node: Node, of_call: frozenset[Node]) -> Node | None:
    """Return the argument from which a node of a call is computed by casts, views, repeats and scaling.

    Return None if unknown.
    """
    while node in of_call:
        sources = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), Tensor)]
        if not sources:
            return None
        node = sources[0]
    return node if isinstance(node.meta.get("val"), Tensor) else None


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _in_words(tensor: Tensor) -> str:
    size, stride = (", ".join(map(str, numbers)) for numbers in (tensor.shape, tensor.stride()))
    return f"{_type(tensor)} on {tensor.device.type} [{size}] with strides [{stride}]"


def _aten(node: Node) -> str:
    """Return the name of the operator before decomposition, if known; else that of the operator that the node calls."""
    original = node.meta.get("original_aten")
    return original._schema.name if isinstance(original, OpOverload) else op_name(node)


def _call(node: Node, kind: str) -> tuple[str, ...] | None:
    """Return the names of the calls in Dynamo's graph from which a node comes, outermost first.

    Return None if there are none.
    """
    stack = node.meta.get(kind)
    return tuple(name for name, _ in stack) if stack else None
