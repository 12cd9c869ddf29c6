"""Gradients of a `score_mod`, read from PyTorch's joint graph of it, so that they are the program's own.

FlexAttention differentiates a score_mod by autograd, and its backward holds the result as a graph on single numbers:
given a score, its indices and the gradient of the modified score, it returns the gradients of the score and of each
tensor that the score_mod reads.  Only this graph shows a `detach`, `no_grad`, or an autograd function with its own
derivative.

The gradient of the score must be the derivative of the form that `scores` has read.  The gradients of tensors are
linear in the gradient of the modified score.  They are inlined into the surrounding graph for all scores at once, and
read the gradient of the bias that the attention backward returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..graph import sizes
from ..graph.emit import Emitter
from ..graph.nodes import bind, op_name
from ..upstream.pytree import tree_map_only
from .mods import Mod, scalar
from .scores import CASTS, CLOSE, Score, refused

aten = torch.ops.aten

SCATTER = "flex_lib::zeros_and_scatter"
"""PyTorch's operator for the gradient of a tensor of which each score reads one element."""

_TENSORWISE = frozenset(
    f"aten::{name}"
    for name in (
        *("view", "reshape", "_unsafe_view", "permute", "transpose"),
        *("t", "unsqueeze", "squeeze", "expand", "sum"),
    )
)
"""Linear operators, besides elementwise ones, that are supported on the result of a scatter."""


def check_gradient_of_score(forward: Mod, joint: Mod, score: Score) -> None:
    """Check that a joint graph's gradient of the score is the derivative of the score_mod as `score` describes it.

    Args:
        forward: the score_mod.
        joint: its joint graph.
        score: the form of the score_mod.

    Raises:
        NotReadable: it is another gradient.
    """
    words = f"the gradient of the score is not the derivative of {forward.text()}"
    node = joint.results[0]
    if not isinstance(node, Node):
        raise refused(joint, words)
    factor, slopes, shown = 1.0, 0, set[tuple[object, bool]]()
    tanh = None if score.tanh is None else forward.token(score.tanh)
    while node is not joint.gradient:
        name, inner = op_name(node), [source for source in node.all_input_nodes if source in joint.of_gradient]
        if len(inner) != 1:
            raise refused(joint, words)
        if name in CASTS and _is_exact(joint, node):
            pass
        elif name == "aten::neg":
            factor = -factor
        elif name == "aten::where" and (stays := _where_gradient_stays(joint, node)) is not None:
            shown.add(stays)
        elif tanh is not None and _multiplied_by_slope(joint, node, inner[0]) == tanh:
            slopes += 1
        elif name in ("aten::mul", "aten::div") and _number(joint, node, inner[0]):
            number = _number(joint, node, inner[0])
            factor = factor * number if name == "aten::mul" else factor / number
        else:
            raise refused(joint, words)
        node = inner[0]
    hidden = {(forward.token(part.node), not part.where) for part in score.hidden}
    if shown != hidden or slopes != (score.tanh is not None):
        raise refused(joint, words)
    if not math.isclose(factor, score.factor, rel_tol=CLOSE):
        raise refused(joint, words)


@dataclass(frozen=True)
class TensorGradient:
    """The gradient of one tensor that a score_mod reads, as a function of the gradient of the bias.

    Attributes:
        joint: the joint graph of the score_mod.
        output: the node of the joint graph that is its result for this tensor.
        gradient: the gradient of the tensor in the surrounding graph, which is replaced.
        given: for nodes of the joint graph that do not depend on the gradient, the nodes of the surrounding graph.
        hidden: nodes that zero the gradients of hidden scores; they are skipped, because the bias has a gradient of 0
            there.
    """

    joint: Mod
    output: Node
    gradient: Node
    given: Mapping[Node, Node]
    hidden: frozenset[Node]

    @staticmethod
    def of(
        joint: Mod, number: int, gradient: Node, conditions: Sequence[tuple[object, bool]], bias: Node,
        write: Callable[[Node], Node],
    ) -> TensorGradient:  # fmt: skip
        """Read the gradient of tensor `number` of a score_mod from its joint graph.

        Args:
            joint: the joint graph of the score_mod.
            number: the index of the tensor among those that the score_mod reads.
            gradient: the gradient of the tensor in the surrounding graph.
            conditions: the conditions that hide scores, as tokens, each with its value for visible scores.
            bias: what is added to the scores, four dimensions.
            write: inlines a node of the joint graph for all scores.

        Raises:
            NotReadable: the gradient is not linear in the gradient of the score, or depends on more than the bias does.
        """
        output = joint.results[5 + number]
        words = f"the gradient of {joint.name_of(number)}"
        if not isinstance(output, Node) or output not in joint.of_gradient:
            raise refused(joint, f"{words} is not that of what is added to the score")
        path = [node for node in joint.behind(output) if node in joint.of_gradient and node is not joint.gradient]
        scattered = _after_scatter(path)
        hidden, given = set[Node](), dict[Node, Node]()
        for node in path:
            if op_name(node) == "aten::where" and _where_gradient_stays(joint, node) in conditions:
                hidden.add(node)
                continue
            if not _is_linear(joint, node, node in scattered):
                raise refused(joint, f"{words} is computed by {op_name(node)} ({joint.text(node)})")
            for source in _free(joint, node):
                given[source] = write(source)
            if node not in scattered:
                _check_axes(joint, node, given, bias, words)
        value: Tensor = output.meta["val"]
        if output not in scattered and value.dim():
            raise refused(joint, f"{words} is a tensor for each score")
        return TensorGradient(joint, output, gradient, given, frozenset(hidden))

    def put(self, emitter: Emitter, of_bias: Node, before: Node) -> tuple[Node, Node]:
        """Return (the gradient of the tensor that the graph reads, its replacement computed from `of_bias`).

        Args:
            emitter: adds nodes.
            of_bias: the gradient of the bias, [B or 1, H or 1, Q or 1, K or 1], the shape of the bias.
            before: the node before which nodes are added.
        """
        free = list(self.given)
        path = [node for node in self.joint.behind(self.output) if node in self.joint.of_gradient]
        dtype = self.gradient.meta["val"].dtype
        scattered = _after_scatter(path)

        def computed(of_bias: Tensor, *tensors: Tensor) -> Tensor:
            values: dict[Node, Any] = dict(zip(free, tensors, strict=True))
            for node in path:
                if node is self.joint.gradient:
                    values[node] = of_bias
                elif node in self.hidden:
                    (source,) = (source for source in node.all_input_nodes if source in self.joint.of_gradient)
                    values[node] = values[source]
                else:
                    args, kwargs = tree_map_only(Node, values.__getitem__, (node.args, node.kwargs))
                    values[node] = _computed(node, args, kwargs)
            found: Tensor = values[self.output]
            if self.output not in scattered:
                found = found.sum()
            return found.to(dtype).contiguous()

        given = (of_bias, *(self.given[node] for node in free))
        return self.gradient, emitter.inline(computed, given, before=before, like=self.gradient)


def _computed(node: Node, args: Any, kwargs: Any) -> Tensor:
    """Compute one node for all scores at once; conversions of single gradients to 16 bits are omitted."""
    if op_name(node) == SCATTER:
        return scattered(*args)
    if op_name(node) in CASTS and not node.meta["val"].dim():
        found: Tensor = args[0]
        return found
    assert callable(node.target)
    result: Tensor = node.target(*args, **kwargs)
    return result


def scattered(shape: Sequence[int], indices: Sequence[Tensor], values: Tensor) -> Tensor:
    """Return a tensor of `shape`, each of whose elements is the sum of `values` over the scores that read this element.

    Args:
        shape: the shape of a tensor of which every score reads one element.
        indices: for each of its dimensions, the indices that the scores read: integers of four dimensions that
            broadcast with one another.
        values: one value per score, in four dimensions that broadcast to the scores.
    """
    size = torch.broadcast_shapes(*(index.shape for index in indices))
    along = [dim for dim in range(4) if not _is_one(size[dim])]
    rest = [dim for dim in range(4) if dim not in along and not _is_one(values.shape[dim])]
    if rest:
        values = values.sum(rest, keepdim=True)
    places = []
    for index, n in zip(indices, shape, strict=True):
        inside = torch.where(index < 0, index + n, index).clamp(0, n - 1)  # hidden scores may have any index
        places.append(inside)
    zeros = values.new_zeros(list(shape))
    return zeros.index_put(tuple(places), values, accumulate=True)


def _is_one(size: Any) -> bool:
    return sizes.static(size) == 1


def _after_scatter(path: Sequence[Node]) -> frozenset[Node]:
    """Return the nodes of a path that are sums over all scores, or are computed from them."""
    found = set[Node]()
    for node in path:
        if op_name(node) == SCATTER or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def _is_linear(joint: Mod, node: Node, is_sum: bool) -> bool:
    """Return whether a node is linear in the gradients it reads, and a number per score or a sum over all scores."""
    name, read = op_name(node), [source for source in node.all_input_nodes if source in joint.of_gradient]
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not value.dtype.is_floating_point or (value.dim() and not is_sum):
        return False
    if name == SCATTER:
        return read == [node.args[2]]
    if name in CASTS:
        return _is_exact(joint, node)
    if name in _TENSORWISE:
        return is_sum and len(read) == 1
    if name in ("aten::add", "aten::sub"):
        args = bind(node)
        return args["self"] in joint.of_gradient and args["other"] in joint.of_gradient
    if name == "aten::mul":
        return len(read) == 1 and node.args[0] is not node.args[1]
    if name == "aten::div":
        return read == [node.args[0]] and bind(node).get("rounding_mode") is None
    if name == "aten::where":
        return _where_gradient_stays(joint, node) is not None
    return name == "aten::neg"


def _free(joint: Mod, node: Node) -> Iterator[Node]:
    """Return the inputs of a node that do not depend on the gradient."""
    return (source for source in node.all_input_nodes if source not in joint.of_gradient)


def _check_axes(joint: Mod, node: Node, given: Mapping[Node, Node], bias: Node, words: str) -> None:
    """Raise NotReadable if a factor of a gradient varies along a dimension in which the bias has size 1."""
    own = bias.meta["val"].shape
    for source in _free(joint, node):
        value = given[source].meta["val"]
        if isinstance(value, Tensor) and value.dim() == 4:
            wide = [dim for dim in range(4) if _is_one(own[dim]) and not _is_one(value.shape[dim])]
            if wide:
                raise refused(joint, f"{words} depends on more than what is added to the score")


def _is_exact(joint: Mod, node: Node) -> bool:
    """Return whether a conversion keeps the precision of kernels: its dtype is the query's or float32."""
    own, dtype = joint.dtype, node.meta["val"].dtype
    return dtype in (own, torch.float32)


def _others(node: Node, source: Node) -> list[Any]:
    return [arg for arg in node.args if arg is not source]


def _number(joint: Mod, node: Node, inner: Node) -> float:
    """Return the number by which a gradient is multiplied or divided; 0 if it is unknown."""
    by = _others(node, inner)
    if len(by) != 1 or node.kwargs or (op_name(node) == "aten::div" and inner is not node.args[0]):
        return 0.0
    return scalar(joint, by[0]) or 0.0


def _where_gradient_stays(joint: Mod, node: Node) -> tuple[object, bool] | None:
    """Return the condition of a choice between a gradient and 0, as a token, and its value where the gradient stays.

    Return None for other nodes.
    """
    args = bind(node)
    condition, then, other = (args[name] for name in ("condition", "self", "other"))
    sides = [(then in joint.of_gradient, other), (other in joint.of_gradient, then)]
    zero = [scalar(joint, rest) == 0.0 for is_gradient, rest in sides if is_gradient]
    if condition in joint.of_gradient or zero != [True]:
        return None
    return joint.token(condition), sides[0][0]


def _multiplied_by_slope(joint: Mod, node: Node, source: Node) -> object:
    """Return the tanh t, as a token, if a node multiplies `source` by ``1 - t * t``; None for other nodes."""
    if op_name(node) == "aten::tanh_backward":
        return joint.token(node.args[1]) if source is node.args[0] else None
    by = _others(node, source)
    return _slope_of(joint, by[0]) if op_name(node) == "aten::mul" and len(by) == 1 else None


def _slope_of(joint: Mod, node: Any) -> object:
    """Return the tanh t, as a token, if a node is ``1 - t * t``; None for other nodes."""
    if not isinstance(node, Node):
        return None
    if op_name(node) == "aten::sub" and not node.kwargs:
        one, square = node.args
    elif op_name(node) == "aten::rsub" and not node.kwargs:
        square, one = node.args[:2]
    else:
        return None
    if scalar(joint, one) != 1.0 or not isinstance(square, Node):
        return None
    is_square = op_name(square) == "aten::mul" and square.args[0] is square.args[1]
    if not is_square and not (op_name(square) == "aten::pow" and square.args[1] == 2):
        return None
    tanh = square.args[0]
    while isinstance(tanh, Node) and op_name(tanh) in CASTS and _is_exact(joint, tanh):  # derivatives use float32
        tanh = tanh.args[0]
    return joint.token(tanh)
