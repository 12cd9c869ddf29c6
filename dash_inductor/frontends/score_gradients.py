"""Gradients of a `score_mod`, read from PyTorch's joint graph of it, so that they are the program's own.

FlexAttention differentiates a score_mod by autograd, and its backward holds the result as a graph on single numbers:
given a score, its indices and the gradient of the modified score, it returns the gradients of the score and of each
tensor that the score_mod reads.  Only this graph shows a `detach`, `no_grad`, or an autograd function with its own
derivative.

The gradient of the score must be the derivative of the form that `scores` has read.  The gradients of tensors are
linear in the gradient of the modified score; `tensor_gradients` reads them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..graph.nodes import bind, op_name
from .mods import Mod, scalar
from .scores import CASTS, CLOSE, Score, ScoreFactor, refused

aten = torch.ops.aten


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
    chain = chain_of(forward, joint, joint.results[0], score, words)
    if not math.isclose(chain.factor, score.factor, rel_tol=CLOSE):
        raise refused(joint, words)
    if Counter(chain.factors) != Counter(tokens_of(forward, score.factors)):
        raise refused(joint, words)


def tokens_of(mod: Mod, factors: Sequence[ScoreFactor]) -> list[tuple[object, bool]]:
    """Return for each factor a token of the number and whether scores are divided by it."""
    return [(mod.token(factor.node), factor.inverse) for factor in factors]


@dataclass(frozen=True)
class Chain:
    """What the gradient of the modified score is multiplied by.

    Attributes:
        factor: the known factor.
        factors: the other factors, as tokens (`tokens_of`).
        nodes: the nodes of the other factors.
    """

    factor: float
    factors: tuple[tuple[object, bool], ...]
    nodes: tuple[ScoreFactor, ...]


def chain_of(forward: Mod, joint: Mod, node: Any, score: Score, words: str) -> Chain:
    """Return by what a node of the joint graph multiplies the gradient of the modified score.

    The node is also 0 for hidden scores and, with a softcap, multiplied by its slope.

    Raises:
        NotReadable: the node is something else; `words` say of what.
    """
    if not isinstance(node, Node):
        raise refused(joint, words)
    factor, unknown, slopes, shown = 1.0, list[ScoreFactor](), 0, set[tuple[object, bool]]()
    tanh = None if score.tanh is None else forward.token(score.tanh)
    while node is not joint.gradient:
        name, inner = op_name(node), [source for source in node.all_input_nodes if source in joint.of_gradient]
        if len(inner) != 1:
            raise refused(joint, words)
        if name in CASTS and is_exact(joint, node):
            pass
        elif name == "aten::neg":
            factor = -factor
        elif name == "aten::where" and (stays := where_gradient_stays(joint, node)) is not None:
            shown.add(stays)
        elif tanh is not None and _multiplied_by_slope(joint, node, inner[0]) == tanh:
            slopes += 1
        elif name in ("aten::mul", "aten::div") and _number(joint, node, inner[0]):
            number = _number(joint, node, inner[0])
            factor = factor * number if name == "aten::mul" else factor / number
        elif (by := _unknown_factor(joint, node, inner[0])) is not None:
            unknown.append(by)
        else:
            raise refused(joint, words)
        node = inner[0]
    hidden = {(forward.token(part.node), not part.where) for part in score.hidden}
    if shown != hidden or slopes != (score.tanh is not None):
        raise refused(joint, words)
    return Chain(factor, tuple(tokens_of(joint, unknown)), tuple(unknown))


def _unknown_factor(joint: Mod, node: Node, inner: Node) -> ScoreFactor | None:
    """Return by which number that is not known a node multiplies or divides a gradient; None for other nodes."""
    by = _others(node, inner)
    if op_name(node) not in ("aten::mul", "aten::div") or node.kwargs or len(by) != 1 or not isinstance(by[0], Node):
        return None
    if by[0] in joint.scored or (op_name(node) == "aten::div" and inner is not node.args[0]):
        return None
    return ScoreFactor(by[0], op_name(node) == "aten::div")


def is_exact(joint: Mod, node: Node) -> bool:
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


def where_gradient_stays(joint: Mod, node: Node) -> tuple[object, bool] | None:
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
    return slope_of(joint, by[0]) if op_name(node) == "aten::mul" and len(by) == 1 else None


def slope_of(joint: Mod, node: Any) -> object:
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
    while isinstance(tanh, Node) and op_name(tanh) in CASTS and is_exact(joint, tanh):  # derivatives use float32
        tanh = tanh.args[0]
    return joint.token(tanh)
