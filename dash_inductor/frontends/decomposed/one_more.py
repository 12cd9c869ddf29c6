"""Softmaxes with one more number in the sum, also called softmax1: ``exp(s - m) / (n * exp(-m) + sum(exp(s - m)))``.

They are softmaxes over the scores and one more, ``log(n)``, that has no value: a sink.  With e = exp(s - m), d for the
sum, r = n * exp(-m) and P = e / d, autograd computes

    dE = dP / d - rowsum(dP * P / d), dS = dE * e

and, if the program differentiates m, a gradient of m that is 0: the part of the exponentials is -rowsum(dS), which is
-r * rowsum(dP * P / d), and that of r is its negative.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch.fx import Node

from ...graph.nodes import op_name
from ...graph.sizes import same_all, static
from .known import Known
from .labels import CAST, COPIES, Labels, shape_of
from .scores import constant_factor, number_of, uncast
from .value import Kind, Value


@dataclass(frozen=True)
class OneMore:
    """What is added to the sum of the exponentials.

    Attributes:
        score: the score of the additional key, log(n).
        scores: the scores s.
        shifted: the scores from which m is subtracted; `scores` itself without m.
        exponential: exp(-m); None without m.
        between: further nodes from m to what is added.
    """

    score: float
    scores: Node
    shifted: Node
    exponential: Node | None
    between: tuple[Node, ...]


def read_one_more(exponential: Node, added: object, dim: int) -> OneMore | None:
    """Return what is added to the sum of the exponentials; None if it is not the power of a known score.

    A constant added to exponentials of scores less their maximum is no power of a known score: it depends on the
    maximum.  Nor is the exponential of a maximum that differs between the keys of a row.

    Args:
        exponential: the exponentials.
        added: what is added to their sum.
        dim: the dimension of the sum.
    """
    shifted = exponential.args[0]
    assert isinstance(shifted, Node)
    number = number_of(added)
    if number is not None:
        return OneMore(math.log(number), shifted, shifted, None, ()) if number > 0 and not _is_shift(shifted) else None
    factor, between = 1.0, list[Node]()
    while isinstance(added, Node) and op_name(added) != "aten::exp":
        between.append(added)
        step = constant_factor(added)
        if step is not None:
            added, factor = step[0], factor * step[1]
        elif op_name(added) in (CAST, *COPIES):
            added = added.args[0]
        else:
            return None
    if not isinstance(added, Node) or not factor > 0 or not _shifts_rows(shifted, dim):
        return None
    negated = added.args[0]
    while isinstance(negated, Node) and op_name(negated) in (CAST, *COPIES):
        between.append(negated)
        negated = negated.args[0]
    if not isinstance(negated, Node) or op_name(negated) != "aten::neg":
        return None
    scores, bound = shifted.args
    if uncast(negated.args[0]) is not uncast(bound) or not isinstance(scores, Node):
        return None
    return OneMore(math.log(factor), scores, shifted, added, (*between, negated))


def _bound(node: Node) -> Node | None:
    """Return the tensor that a node subtracts if it has as many dimensions as the difference; else None."""
    if op_name(node) != "aten::sub" or len(node.args) != 2 or node.kwargs or not isinstance(node.args[1], Node):
        return None
    return node.args[1] if len(shape_of(node.args[1])) == len(shape_of(node)) else None


def _is_shift(node: Node) -> bool:
    """Return whether a node subtracts a tensor that broadcasts, directly, before a factor or by one of two ways.

    Inductor chooses between two ways of subtracting a maximum (`where`).
    """
    step = constant_factor(node)
    if step is not None:
        return _is_shift(step[0])
    if op_name(node) == "aten::where":
        return any(isinstance(way, Node) and _is_shift(way) for way in node.args[1:])
    bound = _bound(node)
    sizes = [] if bound is None else zip(shape_of(bound), shape_of(node), strict=True)
    return any(static(own) == 1 != static(size) for own, size in sizes)


def _shifts_rows(node: Node, dim: int) -> bool:
    """Return whether a node subtracts from scores of its shape a tensor of one number for each row."""
    bound, scores = _bound(node), node.args[0]
    if bound is None or not isinstance(scores, Node) or not same_all(shape_of(scores), shape_of(node)):
        return False
    return static(shape_of(bound)[dim]) == 1


def quotient(values: Known, node: Node) -> Value | None:
    """Return which tensor of attention a quotient by the sum is; None for other quotients."""
    one, other = values.of(node)[:2]
    if one is None or other is None or other.kind != "sum" or not values.scores.in_sum:
        return None
    found: dict[str, Kind] = {"exponential": "P", "P": "P / sum", "dP": "dP / sum"}
    return replace(one, kind=found[one.kind]) if one.kind in found else None


def product(values: Known, a: Value, b: Value) -> Value | None:
    """Return which tensor of attention the product of two is; None for other products."""
    alike, factor = values.atoms.same(a.labels, b.labels), a.factor * b.factor
    found: dict[tuple[str, str], Kind] = {
        ("dP", "P / sum"): "dP P / sum", ("dE", "exponential"): "dS", ("rowsum / sum", "rest"): "rest rowsum / sum"
    }  # fmt: skip
    kind = found.get((a.kind, b.kind))
    return Value(kind, a.labels, factor) if kind is not None and alike else None


def row_sum(values: Known, value: Value, labels: Labels) -> Value | None:
    """Return which tensor of attention the sum over the keys of another is; None for other sums."""
    if value.kind == "dP P / sum":
        return Value("rowsum / sum", labels, value.factor)
    return Value("rest rowsum / sum", labels, value.factor) if value.kind == "dS" and values.scores.in_sum else None


def total(one: Value, other: Value) -> Value | None:
    """Return which tensor of attention the sum of two is, whose factors are opposite; None for other sums."""
    if one.kind == other.kind == "rest rowsum / sum":
        return Value("zero")
    return replace(one, kind="dE") if (one.kind, other.kind) == ("dP / sum", "rowsum / sum") else None
