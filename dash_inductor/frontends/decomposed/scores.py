"""Reads the scores of a softmax: the nodes from the product of query and key to the argument of the exponential."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from ...graph.nodes import bind, op_name
from ...graph.numbers import rounded
from ...graph.sizes import same_all, static
from ..scores import hides
from ..unread.words import NAN
from .labels import (
    CAST,
    COPIES,
    VIEWS,
    Atoms,
    Dimension,
    Labels,
    broadcast,
    is_float,
    is_tensor,
    shape_of,
    shows_bits,
)

PRODUCTS = ("aten::bmm", "aten::mm")
_ADDED = "aten::baddbmm"


class Stuck(Exception):
    """Raised when a node prevents a softmax from being read as part of attention.

    Args:
        node: the node.
        note: the reason, for the record; "" if the operator alone tells it.
    """

    def __init__(self, node: Node, note: str = "") -> None:
        super().__init__(node, note)
        self.node, self.note = node, note

    def __str__(self) -> str:
        name = op_name(self.node) or self.node.op
        return f"{name} ({self.node.name})" + (f": {self.note}" if self.note else "")


class NotAttention(Exception):
    """Raised when a softmax is certainly not part of attention, so that nothing is recorded."""


@dataclass(frozen=True)
class Term:
    """A step between the product and the softmax that adds a mask or bias, or hides scores.

    Attributes:
        kind: "add" for adding a tensor, or "hide" for replacing scores where a condition holds.
        tensor: the tensor, or the condition; it broadcasts to the scores at this step.
        labels: the labels of the scores at this step.
        factor: the known number by which the sum is multiplied afterwards; negated if the tensor is subtracted.
        hidden_if: the value of the condition for which scores are hidden.
        fill: the value of hidden scores.
    """

    kind: str
    tensor: Node
    labels: Labels
    factor: float = 1.0
    hidden_if: bool = True
    fill: float = -math.inf

    def own(self, atoms: Atoms) -> Labels:
        """Return the labels of `tensor`: the atoms (index ranges) that each of its dimensions merges; () for size 1."""
        return broadcast(self.tensor, atoms.resolved(self.labels))


@dataclass(frozen=True)
class Factor:
    """A tensor that multiplies the scores, such as a learned number for each head.

    Attributes:
        node: the product, or the quotient.
        source: the scores that are multiplied.
        tensor: the factor, or the divisor; it broadcasts to the scores.
        labels: the labels of the scores.
        inverse: whether the scores are divided.
        outside: the constant factor by which the product is multiplied later.
    """

    node: Node
    source: Node
    tensor: Node
    labels: Labels
    inverse: bool
    outside: float

    def own(self, atoms: Atoms) -> Labels:
        """Return the labels of `tensor`: the atoms (index ranges) that each of its dimensions merges; () for size 1."""
        return broadcast(self.tensor, atoms.resolved(self.labels))


@dataclass
class Scores:
    """The scores of a softmax, from the product of query and key to the argument of the exponential.

    Attributes:
        atoms: the index ranges, such as heads or keys, of which the dimensions of the attention's tensors consist.
        labels: the labels of the scores' nodes.
        product: the product of query and key.
        outer, inner: the constant factors of the scores, outside and inside of the tanh.
        tanh: the node of a softcap's tanh; None without a softcap.
        terms: masks and biases, the innermost first.
        factor: the factor that is no constant; None without one.
        sink: the attention sink that is concatenated after the scores; None without one.
        one_more: a sink that is a known number; None without one.
        in_sum: whether the power of `one_more` is added to the sum of the softmax; else it is a column.
        key_dim, wide_dim: the labels of the keys' dimension, without and with the column of the sink.
    """

    atoms: Atoms
    labels: dict[Node, Labels] = field(default_factory=dict)
    product: Node | None = None
    outer: float = 1.0
    inner: float = 1.0
    tanh: Node | None = None
    terms: list[Term] = field(default_factory=list)
    factor: Factor | None = None
    sink: Node | None = None
    one_more: float | None = None
    in_sum: bool = False
    key_dim: Dimension = ()
    wide_dim: Dimension = ()

    def copy(self) -> Scores:
        """Return a copy with its own lists and dicts, which shares `atoms` with the original."""
        return Scores(
            self.atoms, dict(self.labels), self.product, self.outer, self.inner, self.tanh, list(self.terms),
            self.factor, self.sink, self.one_more, self.in_sum, self.key_dim, self.wide_dim,
        )  # fmt: skip

    @property
    def has_column(self) -> bool:
        """Whether the scores have a column for a sink behind those of the keys."""
        return self.sink is not None or (self.one_more is not None and not self.in_sum)


def number_of(value: object) -> float | None:
    """Return a number as a float, or the value that all elements of a constant tensor have; None for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if not is_tensor(value):
        return None
    assert isinstance(value, Node)
    name = op_name(value)
    if name in (*COPIES, CAST, *VIEWS, "aten::expand") and not shows_bits(value):
        found = number_of(value.args[0])
    elif name in ("aten::full", "aten::scalar_tensor"):
        given = value.args[1 if name == "aten::full" else 0]
        found = float(given) if isinstance(given, (int, float)) else None
    else:
        return None
    return None if found is None else rounded(found, value.meta["val"].dtype)


def find_scores(exponent: Node, dim: int, one_more: float | None = None) -> Scores:
    """Return the scores of a softmax, read backwards from the argument of its exponential to a matrix product.

    Args:
        exponent: the argument of the exponential.
        dim: the dimension of the softmax.
        one_more: the score whose power is added to the sum of the softmax; None without one.

    Raises:
        Stuck: a node on the way is not part of attention.
    """
    found = Scores(Atoms(), one_more=one_more, in_sum=one_more is not None)
    labels = found.atoms.whole(exponent)
    found.key_dim = found.wide_dim = labels[dim]
    _tile_schedule(found, exponent, labels)
    found.terms.reverse()
    return found


def constant_factor(node: Node) -> tuple[Node, float] | None:
    """Return (tensor, constant) if a node multiplies a tensor by a constant; else None.

    Quotients by a constant, negations, and sums with zero, which stands for a term that a model leaves out, count.
    """
    name, args = op_name(node), node.args
    if name == "aten::neg":
        return (args[0], -1.0) if isinstance(args[0], Node) else None
    if name in ("aten::add", "aten::sub"):
        return _beside_zero(node)
    if name not in ("aten::mul", "aten::div") or len(args) != 2 or node.kwargs:
        return None
    if not is_float(node):
        return None
    one, other = args
    number = number_of(other)
    if number is not None and is_float(one) and _keeps_shape(one, node):
        if name == "aten::div":
            return (one, 1 / number) if number else None  # type: ignore[return-value]
        return one, number  # type: ignore[return-value]
    number = number_of(one) if name == "aten::mul" else None
    if number is not None and is_float(other) and _keeps_shape(other, node):
        return other, number  # type: ignore[return-value]
    return None


def _beside_zero(node: Node) -> tuple[Node, float] | None:
    """Return (tensor, 1) if a node adds zero to a tensor or subtracts it, in the dtype of the tensor; else None."""
    args, dtype = node.args[:2], node.meta["val"].dtype
    for one, zero in (args, args[::-1]) if op_name(node) == "aten::add" else (args,):
        if number_of(zero) != 0 or not isinstance(one, Node) or not is_float(one):
            continue
        if _keeps_shape(one, node) and one.meta["val"].dtype == dtype:
            return one, 1.0
    return None


def uncast(node: object) -> object:
    """Return the node before conversions and copies."""
    while isinstance(node, Node) and op_name(node) in (CAST, *COPIES):
        node = node.args[0]
    return node


def _keeps_shape(source: Any, node: Node) -> bool:
    return same_all(shape_of(source), shape_of(node))


def _takes_shifts(found: Scores) -> bool:
    """Return whether subtracting a number from a query's scores changes nothing: no softcap, factor or sink follows."""
    return found.tanh is None and found.factor is None and found.sink is None and found.one_more is None


def _is_row_bound(found: Scores, node: object, labels: Labels) -> bool:
    """Return whether a node is a maximum over a query's keys, which may be subtracted without changing the softmax."""
    node = uncast(node)
    if not isinstance(node, Node) or len(shape_of(node)) != len(labels):
        return False
    over_keys = [
        static(n) for n, dim in zip(shape_of(node), labels, strict=True) if dim in (found.wide_dim, found.key_dim)
    ]
    if over_keys != [1]:
        return False
    source = node.args[0] if node.args else None
    of_both = isinstance(source, Node) and op_name(source) == "aten::max" and bool(node.args[1] == 0)
    return op_name(node) == "aten::amax" or of_both


def _tile_schedule(found: Scores, node: Node, labels: Labels) -> None:
    while True:
        found.labels[node] = labels
        if op_name(node) in (*PRODUCTS, _ADDED):
            _end(found, node, labels)
            return
        node, labels = _step(found, node, labels)


def _end(found: Scores, node: Node, labels: Labels) -> None:
    """Record the product, which in ``baddbmm`` may also add a mask and apply a factor."""
    found.product = node
    if op_name(node) != _ADDED:
        return
    args = bind(node)
    if args["beta"] != 0 and number_of(args["self"]) != 0:
        _check_term(found, node)
        found.terms.append(Term("add", args["self"], labels, found.outer * args["beta"]))
    if found.tanh is None:
        found.outer *= args["alpha"]
    else:
        found.inner *= args["alpha"]


def _step(found: Scores, node: Node, labels: Labels) -> tuple[Node, Labels]:
    """Return the scores from which a node is computed in one known step, and their labels.

    Raises:
        Stuck: the step is unknown.
    """
    back = found.atoms.back(node, labels)
    if back is not None:
        source = node.args[0]
        assert isinstance(source, Node)
        return source, back
    name, args = op_name(node), node.args
    factor = constant_factor(node)
    if factor is not None:
        if found.tanh is None:
            found.outer *= factor[1]
        else:
            found.inner *= factor[1]
        return factor[0], labels
    is_difference = name == "aten::sub" and len(args) == 2 and not node.kwargs
    if is_difference and _takes_shifts(found) and _is_row_bound(found, args[1], labels):
        source = args[0]
        if isinstance(source, Node) and _keeps_shape(source, node):
            return source, labels
    if name in ("aten::mul", "aten::div"):
        return _multiplied(found, node, labels)
    if name == "aten::tanh" and found.tanh is None:
        if found.factor is not None:
            raise Stuck(found.factor.node, f"multiplies a softcap by {found.factor.tensor.name}, which is no constant")
        found.tanh = node
        source = args[0]
        assert isinstance(source, Node)
        return source, labels
    if name in ("aten::add", "aten::sub") and len(args) == 2:
        if node.kwargs.get("alpha", 1) != 1:
            raise Stuck(node, "a factor of one of its summands")
        return _added(found, node, labels)
    if name == "aten::where":
        return _either(found, node, labels) or _hidden(found, node, labels)
    if name == "aten::cat":
        return _beside_sink(found, node, labels)
    if name == "aten::constant_pad_nd":
        return _beside_number(found, node, labels)
    raise Stuck(node)


def _bounded_product(found: Scores, node: Node, labels: Labels) -> tuple[Node, Labels] | None:
    """Return the scores R of ``(R * sign(f) - amax(R * sign(f))) * (sign(f) * f)``; None for other nodes.

    Inductor writes the product of scores R and a factor f of each query so, in front of a softmax; quotients likewise.
    """
    difference, by = _call_of("aten::sub", node.args[0]), _call_of("aten::mul", node.args[1])
    if difference is None or by is None or found.factor is not None:
        return None
    (sign, tensor), (signed, bound) = by.args[:2], difference.args[:2]
    if not _is_sign(sign, tensor) or _call_of("aten::mul", signed) is None or signed.args[1] is not sign:
        return None
    source, of_row = signed.args[0], broadcast(tensor, found.atoms.resolved(labels))
    if found.atoms.atoms(found.wide_dim) in of_row or not _takes_shifts(found) or not _keeps_shape(source, node):
        return None
    if not _is_row_bound(found, bound, labels):
        return None
    found.labels |= {difference: labels, signed: labels}
    found.factor = Factor(node, source, tensor, labels, op_name(node) == "aten::div", found.outer * found.inner)
    return source, labels


def _call_of(name: str, node: Any) -> Any:
    """Return the node if it calls the operator of this name; else None."""
    return node if isinstance(node, Node) and op_name(node) == name else None


def _is_sign(node: Any, tensor: Any) -> bool:
    """Return whether a node is 1 where the tensor is at least 0, and -1 elsewhere."""
    if _call_of("aten::where", node) is None:
        return False
    condition, one, other = node.args
    at_least = _call_of("aten::ge", condition) is not None
    at_least = at_least and condition.args[0] is tensor and number_of(condition.args[1]) == 0
    negative = _call_of("aten::neg", other) is not None and number_of(other.args[0]) == 1
    return at_least and number_of(one) == 1 and negative


def _check_term(found: Scores, node: Node) -> None:
    if found.tanh is not None:
        raise Stuck(node, "a softcap around a mask")
    if found.factor is not None:
        by = found.factor.tensor.name
        raise Stuck(found.factor.node, f"multiplies masked or biased scores by {by}, which is no constant")


def _multiplied(found: Scores, node: Node, labels: Labels) -> tuple[Node, Labels]:
    """Return the scores that a tensor multiplies or divides."""
    first: Stuck | None = None
    bounded = _bounded_product(found, node, labels)
    if bounded is not None:
        return bounded
    inverse, ways = op_name(node) == "aten::div", [node.args[:2], node.args[1::-1]]
    for source, other in ways[: 1 if inverse else 2]:
        if len(node.args) != 2 or node.kwargs or not is_tensor(other) or not is_float(source):
            continue
        assert isinstance(source, Node)
        assert isinstance(other, Node)
        if not _keeps_shape(source, node) or other.meta["val"].dtype.is_complex:
            continue
        trial = found.copy()
        trial.factor = Factor(node, source, other, labels, inverse, found.outer * found.inner)
        try:
            _tile_schedule(trial, source, labels)
        except Stuck as error:
            first = first or error
            continue
        if found.factor is not None:
            raise Stuck(node, f"a second factor that is no constant, beside {found.factor.tensor.name}")
        found.factor = trial.factor
        return source, labels
    raise first or Stuck(node)


def _added(found: Scores, node: Node, labels: Labels) -> tuple[Node, Labels]:
    """Return the summand that leads to a product; the other one, which may be subtracted, is a mask or a bias."""
    first: Stuck | None = None
    _check_term(found, node)
    is_sum = op_name(node) == "aten::add"
    for source, other in (node.args, node.args[::-1]) if is_sum else (node.args,):
        if not isinstance(source, Node) or not isinstance(other, Node) or not is_float(source) or not is_float(other):
            continue
        if not _keeps_shape(source, node) or not shape_of(other):
            continue
        term = Term("add", other, labels, found.outer if is_sum else -found.outer)
        trial = found.copy()
        trial.terms.append(term)
        try:
            _tile_schedule(trial, source, labels)
        except Stuck as error:
            first = first or error
            continue
        found.terms.append(term)
        return source, labels
    raise first or Stuck(node)


def _either(found: Scores, node: Node, labels: Labels) -> tuple[Node, Labels] | None:
    """Return scores from which one of two row bounds is subtracted.

    Inductor chooses a bound that no factor makes infinite.  Return None if the condition is not one per row.
    """
    condition, one, other = node.args
    ways = [source for source in (one, other) if isinstance(source, Node) and is_float(source)]
    ways = [source for source in ways if _keeps_shape(source, node)]
    assert isinstance(condition, Node)
    of_row = len(shape_of(condition)) == len(labels) and all(
        static(size) == 1 for size, dim in zip(shape_of(condition), labels, strict=True) if dim == found.wide_dim
    )
    if len(ways) != 2 or not of_row:
        return None
    trials = [found.copy(), found.copy()]
    for trial, source in zip(trials, ways, strict=True):
        _tile_schedule(trial, source, labels)
    a, b = trials
    if not _alike(a, b):
        raise Stuck(node, "different scores")
    found.labels |= b.labels
    return ways[0], labels


def _alike(a: Scores, b: Scores) -> bool:
    """Return whether two paths lead to the same product by the same factors, masks and dimensions."""
    factors = math.isclose(a.outer, b.outer, rel_tol=1e-6) and math.isclose(a.inner, b.inner, rel_tol=1e-6)
    common = a.labels.keys() & b.labels.keys()
    if any(a.atoms.resolved(a.labels[node]) != a.atoms.resolved(b.labels[node]) for node in common):
        return False
    own, others = (
        [(t.kind, t.tensor, found.atoms.resolved(t.labels), t.factor, t.hidden_if, t.fill) for t in found.terms]
        for found in (a, b)
    )
    nodes = [(found.product, found.tanh, found.sink, _factor_of(found)) for found in (a, b)]
    return factors and own == others and nodes[0] == nodes[1]


def _factor_of(found: Scores) -> tuple[object, ...]:
    """Return what makes two factors the same."""
    factor = found.factor
    return () if factor is None else (uncast(factor.source), factor.tensor, factor.inverse)


def _hidden(found: Scores, node: Node, labels: Labels) -> tuple[Node, Labels]:
    condition, chosen, other = node.args
    for source, filled, hidden_if in ((other, chosen, True), (chosen, other, False)):
        fill = number_of(filled)
        if fill is None or not isinstance(source, Node) or not is_float(source) or not _keeps_shape(source, node):
            continue
        _check_term(found, node)
        if not found.outer > 0 or not hides(fill * found.outer, source.meta["val"].dtype):
            nan = _where_nan(node)
            if nan is not None:
                raise Stuck(nan, NAN)
            raise Stuck(node, f"scores become {fill * found.outer}, which does not hide a key")
        assert isinstance(condition, Node)
        found.terms.append(Term("hide", condition, labels, found.outer, hidden_if, fill))
        return source, labels
    raise Stuck(node)


def _where_nan(node: object) -> Node | None:
    """Return the node that finds NaN, if this one chooses other scores there, directly or among its operands."""
    while isinstance(node, Node) and op_name(node) == "aten::where":
        condition, _, node = node.args
        if isinstance(condition, Node) and op_name(condition) == "aten::isnan":
            return condition
    return None


def _beside_sink(found: Scores, node: Node, labels: Labels) -> tuple[Node, Labels]:
    tensors = bind(node)["tensors"]
    dim = bind(node)["dim"] % len(labels)
    if found.has_column or found.in_sum or labels[dim] != found.wide_dim or len(tensors) != 2:
        raise Stuck(node)
    scores, sink = tensors
    if static(shape_of(sink)[dim]) != 1 or not is_float(sink):
        raise Stuck(node, "something else than a column behind the scores")
    found.sink = sink
    return scores, _without_column(found, node, scores, dim, labels)


def _beside_number(found: Scores, node: Node, labels: Labels) -> tuple[Node, Labels]:
    """Return the scores that are padded by a column of a number."""
    args = bind(node)
    scores, value = args["self"], args["value"]
    is_column = list(args["pad"]) == [0, 1] and labels[-1] == found.wide_dim and not (found.has_column or found.in_sum)
    if not is_column or not math.isfinite(value or 0.0):
        raise Stuck(node)
    found.one_more = float(value or 0.0)
    return scores, _without_column(found, node, scores, len(labels) - 1, labels)


def _without_column(found: Scores, node: Node, scores: Node, dim: int, labels: Labels) -> Labels:
    """Return the labels of scores, given those of scores with a column for a sink."""
    if found.terms or found.tanh is not None or found.factor is not None or found.outer != 1.0:
        raise Stuck(node, "a mask or factor of the sink")
    own = found.atoms.whole(scores)
    found.key_dim = own[dim]
    return (*labels[:dim], own[dim], *labels[dim + 1 :])
