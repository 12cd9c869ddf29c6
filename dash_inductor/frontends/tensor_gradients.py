"""Gradients of the tensors that a `score_mod` reads, from PyTorch's joint graph of it (see `score_gradients`).

They are inlined into the surrounding graph for all scores at once.  For tensors that are added to scores, they read the
gradient of the bias that the attention backward returns; for factors of scores, the sums of products of query or key
with their gradients (see `factors`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..graph import sizes
from ..graph.emit import Emitter
from ..graph.nodes import bind, op_name
from ..upstream.pytree import tree_map_only
from .factors import Side
from .mods import Mod, Plane
from .score_gradients import chain_of, is_exact, slope_of, tokens_of, where_gradient_stays
from .scores import CASTS, Score, ScoreFactor, factors_of, refused

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


@dataclass(frozen=True)
class TensorGradient:
    """The gradient of one tensor that a score_mod reads, as a function of the gradient of the bias or of a factor.

    Attributes:
        joint: the joint graph of the score_mod.
        output: the node of the joint graph that is its result for this tensor.
        gradient: the gradient of the tensor in the surrounding graph, which is replaced.
        given: for nodes of the joint graph that do not depend on the gradient, the nodes of the surrounding graph.
        hidden: nodes that zero the gradients of hidden scores; they are skipped, because the bias has a gradient of 0
            there.
        seeds: the nodes of the joint graph of which it is a function.  Each is the gradient of the bias or of the
            factor, times a known factor and nodes of `given`.
        side: whether it is a function of the gradient of a factor of the query or the key.
        over_heads: whether the gradient of the factor is summed over heads first, because they share keys.
    """

    joint: Mod
    output: Node
    gradient: Node
    given: Mapping[Node, Node]
    hidden: frozenset[Node]
    seeds: Mapping[Node, tuple[float, tuple[ScoreFactor, ...]]]
    side: Side = "query"
    over_heads: bool = False

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
        output = _output(joint, number)
        assert joint.gradient is not None
        hidden, given = _read(joint, number, {joint.gradient}, conditions, bias.meta["val"].shape, write)
        return TensorGradient(joint, output, gradient, given, hidden, {joint.gradient: (1.0, ())})

    @staticmethod
    def of_factor(
        joint: Mod, forward: Mod, number: int, gradient: Node, score: Score, plane: Plane, write: Callable[[Node], Node]
    ) -> TensorGradient | None:
        """Read the gradient of tensor `number` of a score_mod, from which factors of the score are computed.

        Return None if no factor of the score is computed from it.

        Args:
            joint: the joint graph of the score_mod.
            forward: the score_mod.
            number: the index of the tensor among those that the score_mod reads.
            gradient: the gradient of the tensor in the surrounding graph.
            score: the form of the score_mod.
            plane: the scores.
            write: inlines a node of the joint graph for all scores.

        Raises:
            NotReadable: the gradient is not linear in the gradient of the factor, or depends on more than the factor.
        """
        output, words = joint.results[5 + number], f"the gradient of {joint.name_of(number)}"
        if not any(number in forward.places(factor.node) for factor in score.factors):
            return None
        output = _output(joint, number)
        products = {node: parts for node in joint.behind(output) if (parts := _product(forward, joint, node))}
        for side in ("query", "key"):
            seeds = {node: _seed(forward, joint, *parts, score, side, words) for node, parts in products.items()}
            if products and None not in seeds.values():
                break
        else:
            raise refused(joint, f"{words} is not that of a factor of the score")
        found = {node: seed for node, seed in seeds.items() if seed is not None}
        over_heads = side == "key" and plane.shares_keys
        own: list[Any] = [plane.size(axis) for axis in range(4)]
        own[3 if side == "query" else 2] = 1
        if over_heads:
            own[1] = 1
        hidden, given = _read(joint, number, set(found), (), own, write)
        for _, rest in found.values():
            for factor in rest:
                given[factor.node] = write(factor.node)
                _check_axes(joint, [factor.node], given, own, words)
        return TensorGradient(joint, output, gradient, given, hidden, found, side, over_heads)

    def put(self, emitter: Emitter, of_bias: Node, before: Node) -> tuple[Node, Node]:
        """Return (the gradient of the tensor that the graph reads, its replacement computed from `of_bias`).

        Args:
            emitter: adds nodes.
            of_bias: the gradient of the bias, [B or 1, H or 1, Q or 1, K or 1], the shape of the bias; or that of the
                factor, float32 [batch, heads, length, 1].
            before: the node before which nodes are added.
        """
        free = list(self.given)
        reached = _reached(self.joint, self.output, set(self.seeds))
        dtype = self.gradient.meta["val"].dtype
        scattered = _after_scatter(reached)

        def computed(of_bias: Tensor, *tensors: Tensor) -> Tensor:
            values: dict[Node, Any] = dict(zip(free, tensors, strict=True))
            if self.side == "key":
                of_bias = of_bias.transpose(2, 3)
            if self.over_heads:
                of_bias = of_bias.sum(1, keepdim=True)
            for node in reached:
                if node in self.seeds:
                    values[node] = _times(of_bias, *self.seeds[node], values)
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


def _output(joint: Mod, number: int) -> Node:
    output = joint.results[5 + number]
    if not isinstance(output, Node) or output not in joint.of_gradient:
        words = f"the gradient of {joint.name_of(number)}"
        raise refused(joint, f"{words} is not that of what is added to the score, or of what multiplies it")
    return output


def _reached(joint: Mod, output: Node, seeds: Set[Node]) -> list[Node]:
    """Return the seeds and all nodes on the way from them to the output, in graph order."""
    found = set(seeds)
    for node in joint.behind(output):
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return sorted(node for node in joint.behind(output) if node in found)


def _read(
    joint: Mod, number: int, seeds: Set[Node], conditions: Sequence[tuple[object, bool]], size: Sequence[Any],
    write: Callable[[Node], Node],
) -> tuple[frozenset[Node], dict[Node, Node]]:  # fmt: skip
    """Check that a tensor's gradient is a linear function of the seeds; return what `TensorGradient` has of it.

    Args:
        joint: the joint graph of the score_mod.
        number: the index of the tensor.
        seeds: nodes of the joint graph.
        conditions: the conditions that hide scores, as tokens, each with its value for visible scores.
        size: the sizes of the seeds for all scores, four dimensions.
        write: inlines a node of the joint graph for all scores.

    Returns:
        The nodes that zero the gradients of hidden scores, and the written nodes (`hidden` and `given`).

    Raises:
        NotReadable: the gradient is no such function.
    """
    output, words = _output(joint, number), f"the gradient of {joint.name_of(number)}"
    reached = _reached(joint, output, seeds)
    scattered = _after_scatter(reached)
    hidden, given = set[Node](), dict[Node, Node]()
    for node in reached:
        if node in seeds:
            continue
        if any(source in joint.of_gradient and source not in reached for source in node.all_input_nodes):
            raise refused(joint, f"{words} is that of a factor and of something else")
        if op_name(node) == "aten::where" and where_gradient_stays(joint, node) in conditions:
            hidden.add(node)
            continue
        if not _is_linear(joint, node, node in scattered):
            raise refused(joint, f"{words} is computed by {op_name(node)} ({joint.text(node)})")
        free = list(_free(joint, node))
        for source in free:
            given[source] = write(source)
        if node not in scattered:
            _check_axes(joint, free, given, size, words)
    value: Tensor = output.meta["val"]
    if output not in scattered and value.dim():
        raise refused(joint, f"{words} is a tensor for each score")
    return frozenset(hidden), given


def _product(forward: Mod, joint: Mod, node: Node) -> tuple[Node, Node] | None:
    """Return the gradient and the score if a node of the joint graph multiplies them; None for other nodes."""
    if op_name(node) != "aten::mul" or node.kwargs or node not in joint.of_gradient:
        return None
    for gradient, other in (node.args, node.args[::-1]):
        if gradient in joint.of_gradient and other in joint.scored and other not in joint.of_gradient:
            assert isinstance(gradient, Node)
            assert isinstance(other, Node)
            return None if slope_of(joint, other) is not None else (gradient, other)
    return None


def _seed(
    forward: Mod, joint: Mod, gradient: Node, scored: Node, score: Score, side: Side, words: str
) -> tuple[float, tuple[ScoreFactor, ...]] | None:
    """Return by what to multiply the gradient of the factor of `side` to get a product of gradient and score.

    The gradient of the factor of the query is the sum, over keys, of the gradient of the score, times all factors
    except those of the query, times the score; that of the key is the same with the other side.  Return None if the
    product does not have the factors of the other side, or has further ones.

    Raises:
        NotReadable: the nodes are no gradient and no score.
    """
    chain = chain_of(forward, joint, gradient, score, words)
    known, unknown, inner = factors_of(joint, scored)
    if inner is not joint.score:
        raise refused(joint, f"{words} depends on more than the score")
    rest = [*chain.nodes, *unknown]
    of_others = [factor for factor in score.factors if side_of(forward, factor) != side]
    for token in tokens_of(forward, of_others):
        tokens = tokens_of(joint, rest)
        if token not in tokens:
            return None
        del rest[tokens.index(token)]
    other = 3 if side == "query" else 2
    if any(other in joint.axes(factor.node) for factor in rest):
        return None
    return chain.factor * known / score.factor, tuple(rest)


def side_of(mod: Mod, factor: ScoreFactor) -> Side:
    """Return whether query or key is multiplied by a factor of the score.

    Raises:
        NotReadable: the factor depends on both positions.
    """
    axes = mod.axes(factor.node)
    if {2, 3} <= axes:
        raise refused(mod, f"multiplies the score by {mod.text(factor.node)}, which depends on both q and kv")
    return "key" if 3 in axes else "query"


def _times(tensor: Tensor, known: float, factors: Sequence[ScoreFactor], values: Mapping[Node, Any]) -> Tensor:
    if known != 1.0:
        tensor = tensor * known
    for factor in factors:
        tensor = tensor / values[factor.node] if factor.inverse else tensor * values[factor.node]
    return tensor


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
            broadcast with one another, or of none where all scores read the same.
        values: one value per score, in four dimensions that broadcast to the scores.
    """
    size = torch.broadcast_shapes((1,) * 4, *(index.shape for index in indices))
    along = [dim for dim in range(4) if not _is_one(size[dim])]
    rest = [dim for dim in range(4) if dim not in along and not _is_one(values.shape[dim])]
    if rest:
        values = values.sum(rest, keepdim=True)
    places = []
    for index, n in zip(indices, shape, strict=True):
        inside = torch.where(index < 0, index + n, index).clamp(0, n - 1)  # hidden scores may have any index
        places.append(inside if inside.dim() else inside.view([1] * 4))
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
        return is_exact(joint, node)
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
        return where_gradient_stays(joint, node) is not None
    return name == "aten::neg"


def _free(joint: Mod, node: Node) -> Iterator[Node]:
    """Return the inputs of a node that do not depend on the gradient."""
    return (source for source in node.all_input_nodes if source not in joint.of_gradient)


def _check_axes(
    joint: Mod, sources: Sequence[Node], given: Mapping[Node, Node], own: Sequence[Any], words: str
) -> None:
    """Raise NotReadable if a factor of a gradient varies along a dimension of size 1 in `own`."""
    for source in sources:
        value = given[source].meta["val"]
        if isinstance(value, Tensor) and value.dim() == 4:
            wide = [dim for dim in range(4) if _is_one(own[dim]) and not _is_one(value.shape[dim])]
            if wide:
                raise refused(joint, f"{words} depends on more than what is added to the score or multiplies it")
