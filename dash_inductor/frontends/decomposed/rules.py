"""Rules that tell which tensor of attention an elementwise operator or a reduction computes from its arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from torch.fx import Node

from ...graph.nodes import bind, op_name
from ...graph.sizes import Dim, same, static
from . import factor_rules, one_more
from .known import Known
from .labels import CAST, COPIES, Labels, shape_of
from .scores import constant_factor, number_of
from .value import Kind, Value

_EMPTY: dict[tuple[str, str], Kind] = {
    ("hidden", "aten::logical_not"): "visible",
    ("visible", "aten::any"): "row visible",
    ("row visible", "aten::logical_not"): "empty",
    ("hidden", "aten::all"): "empty",
}
"""How programs find rows whose scores are all minus infinity, whose probabilities they replace by zeros, because they
would be NaN."""

_RANDOM = ("aten::rand", "prims::inductor_random")


def _maximum(values: Known, node: Node) -> Value | None:
    return Value("row") if values.is_kind(node.args[0], "score") else None


def _maximum_and_place(values: Known, node: Node) -> Value | None:
    return Value("maximum") if values.is_kind(node.args[0], "score") else None


def _at_least(values: Known, node: Node) -> Value | None:
    """Return the value of a maximum of the scores that is bounded from below, as by 0, the score of a sink."""
    bounded = values.scores.in_sum and values.is_kind(node.args[0], "row")
    return Value("row") if bounded and all(number_of(bound) is not None for bound in node.args[1:2]) else None


def result_of_maximum(values: Known, node: Node) -> Value | None:
    """Return the `Value` of a getitem of ``max(dim)`` of the scores: the maximum or its index.

    Return None for the maximum of another tensor.
    """
    if not values.is_kind(node.args[0], "maximum"):
        return None
    return Value("row" if node.args[1] == 0 else "index")


def _flag(values: Known, node: Node) -> Value | None:
    known = [values.is_kind(arg, "score", "row", "flag") or number_of(arg) is not None for arg in node.args[:2]]
    name, first = op_name(node), values.of(node)[0]
    if name == "aten::eq" and first is not None and first.kind == "score" and number_of(node.args[1]) == -math.inf:
        return Value("hidden", first.labels)
    if first is not None and (first.kind, name) in _EMPTY:
        labels = _row_labels(values, node, first.labels) if name in ("aten::any", "aten::all") else first.labels
        return None if labels is None else Value(_EMPTY[first.kind, name], labels)
    tests = name in ("aten::eq", "aten::ne")
    return Value("flag") if all(known if tests else known[:1]) else None


def _mul(values: Known, node: Node) -> Value | None:
    of_factor = factor_rules.product(values, node)
    if of_factor is not None:
        return of_factor
    for one, other in (node.args, node.args[::-1]):
        a, b = (values.known.get(arg) if isinstance(arg, Node) else None for arg in (one, other))
        if a is None:
            continue
        if a.kind == "zero":
            return a
        if b is None:
            if a.kind == "P" and isinstance(other, Node) and node not in values.of_backward:
                return _drop(values, a, other)
            continue
        found = _times(values, a, b)
        if found is not None:
            return found
    return None


def _div(values: Known, node: Node) -> Value | None:
    first = values.of(node)[0]
    if first is not None and first.kind in ("zero", "flag"):
        return first
    return one_more.quotient(values, node) or factor_rules.quotient(values, node)


def _times(values: Known, a: Value, b: Value) -> Value | None:
    factor, alike = a.factor * b.factor, values.atoms.same(a.labels, b.labels)
    pair = a.kind, b.kind
    if pair == ("flag", "flag"):
        return a
    if pair == ("tanh", "tanh") and alike:
        return Value("tanh squared", a.labels)
    if pair == ("dD", "keep") and alike:
        return Value("dP", a.labels, factor * (1 - values.dropout))
    if pair == ("dP", "P") and alike:
        return Value("P dP", a.labels, factor)
    if pair == ("P", "rowsum") and _fits_rows(values, b.labels, a.labels):
        return Value("P rowsum", a.labels, factor)
    if pair == ("dP - rowsum", "P") and alike:
        return Value("dS", a.labels, factor)
    if pair == ("dS", "slope") and alike:
        return Value("capped dS", a.labels, factor)
    return one_more.product(values, a, b)


def _drop(values: Known, probabilities: Value, other: Node) -> Value | None:
    """Return the value of probabilities after dropout: multiplied by a random mask and a constant.

    Return None if `other` differs.
    """
    chain, factor = [(other, 1.0)], 1.0
    while op_name(other) != "aten::gt":
        step = constant_factor(other)
        if step is not None:
            other, factor = step[0], factor * step[1]
        elif op_name(other) in (CAST, *COPIES) and isinstance(other.args[0], Node):
            other = other.args[0]
        else:
            return None
        chain.append((other, factor))
    drawn, p = other.args
    draws = []
    while isinstance(drawn, Node) and op_name(drawn) in (CAST, *COPIES):
        draws.append(drawn)
        drawn = drawn.args[0]
    if not isinstance(drawn, Node) or op_name(drawn) not in _RANDOM or not isinstance(p, (int, float)):
        return None
    whole = len(shape_of(drawn)) == len(probabilities.labels)
    if values.random or not whole or not 0 < p < 1 or not all(map(same, shape_of(drawn), _sizes(probabilities.labels))):
        return None
    values.dropout, values.random = float(p), [drawn, *drawn.all_input_nodes]
    for node in (drawn, *draws):
        values.set(node, Value("random"))
    for node, after in chain:
        values.set(node, Value("keep", probabilities.labels, factor / after))
    return Value("D", probabilities.labels, probabilities.factor * factor)


def _sub(values: Known, node: Node) -> Value | None:
    one, other = values.of(node)[:2]
    if node.kwargs:
        return None
    if number_of(node.args[0]) == 1 and other is not None and other.kind == "tanh squared":
        return Value("slope", other.labels)
    if one is None or other is None or not _close(one.factor, other.factor):
        return None
    if (one.kind, other.kind) == ("P dP", "P rowsum") and values.atoms.same(one.labels, other.labels):
        return replace(one, kind="dS")
    if (one.kind, other.kind) == ("dP", "rowsum") and _fits_rows(values, other.labels, one.labels):
        return replace(one, kind="dP - rowsum")
    return None


def _rsub(values: Known, node: Node) -> Value | None:
    one = values.of(node)[0]
    squared = one is not None and one.kind == "tanh squared" and number_of(node.args[1]) == 1 and not node.kwargs
    return Value("slope", one.labels) if squared and one is not None else None


def _add(values: Known, node: Node) -> Value | None:
    if node.kwargs:
        return None
    for one, other in (values.of(node)[:2], values.of(node)[1::-1]):
        if one is None or other is None:
            continue
        if other.kind == "zero" and one.kind in ("dS", "zero"):
            return one
        if (one.kind, other.kind) == ("P dP", "P rowsum") and _close(one.factor, -other.factor):
            return replace(one, kind="dS") if values.atoms.same(one.labels, other.labels) else None
        fits = values.atoms.same(one.labels, other.labels) or _fits_rows(values, other.labels, one.labels)
        if fits and _close(one.factor, -other.factor):
            found = one_more.total(one, other)
            if found is not None:
                return found
    return None


def _fma(values: Known, node: Node) -> Value | None:
    a, b, c = values.of(node)
    if a is None or b is None or c is None or (a.kind, b.kind, c.kind) != ("P", "rowsum", "P dP"):
        return None
    fits = values.atoms.same(a.labels, c.labels) and _fits_rows(values, b.labels, a.labels)
    fits = fits and _close(a.factor * b.factor, -c.factor)
    return replace(c, kind="dS") if fits else None


def _sum(values: Known, node: Node) -> Value | None:
    value, args = values.of(node)[0], bind(node)
    if value is not None and value.kind in ("R dS", "dfactor"):
        return factor_rules.total(values, node, value)
    if value is None or not args.get("dim"):
        return None
    if value.kind == "flag":
        return value
    labels = _row_labels(values, node, value.labels)
    if labels is None:
        return None
    found = one_more.row_sum(values, value, labels)
    if found is not None or value.kind not in ("P dP", "dS"):
        return found
    return Value("rowsum", labels, value.factor) if value.kind == "P dP" else Value("zero")


def _row_labels(values: Known, node: Node, labels: Labels) -> Labels | None:
    """Return the labels of a reduction over the keys alone that keeps the dimension; None for other reductions."""
    args, labels = bind(node), values.atoms.resolved(labels)
    dims = args.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    if not dims or len(dims) != 1 or not args.get("keepdim") or not labels:
        return None
    dim = dims[0] % len(labels)
    if labels[dim] != values.atoms.atoms(values.scores.wide_dim):
        return None
    return (*labels[:dim], (), *labels[dim + 1 :])


def _fits_rows(values: Known, row: Labels, plane: Labels) -> bool:
    """Return whether a tensor has one number for each row of a plane, where the plane has the dimension of the row."""
    wide = values.atoms.atoms(values.scores.wide_dim)
    of_rows = tuple(() if dim == wide else dim for dim in values.atoms.resolved(plane))
    return values.atoms.same(row, of_rows)


def _where(values: Known, node: Node) -> Value | None:
    condition, *_ = node.args
    for place, zero in ((2, 1), (1, 2)):
        kept = node.args[place]
        value = values.known.get(kept) if isinstance(kept, Node) else None
        if value is None or number_of(node.args[zero]) != 0:
            continue
        if value.kind == "zero":
            return value
        if value.kind == "P" and place == 2 and _hides_nothing_else(values, condition, value.labels):
            return value
        if value.kind in ("dS", "capped dS") and any(
            term.kind == "hide" and term.tensor is condition and term.hidden_if == (place == 2)
            for term in values.scores.terms
        ):
            return value
    return None


def _hides_nothing_else(values: Known, condition: object, labels: Labels) -> bool:
    """Return whether a condition holds only where probabilities are 0, or in rows whose keys are all hidden."""
    found = values.known.get(condition) if isinstance(condition, Node) else None
    if found is None:
        return False
    of_pairs = found.kind == "hidden" and values.atoms.same(found.labels, labels)
    return of_pairs or (found.kind == "empty" and _fits_rows(values, found.labels, labels))


def _scatter(values: Known, node: Node) -> Value | None:
    return Value("zero") if number_of(node.args[0]) == 0 and values.is_kind(node.args[3], "zero") else None


def _slice(values: Known, node: Node) -> Value | None:
    args, value = bind(node), values.of(node)[0]
    if value is None or value.kind not in ("P", "dS") or not values.scores.has_column or args["step"] != 1:
        return None
    labels, dim = values.atoms.resolved(value.labels), args["dim"] % len(value.labels)
    if labels[dim] != values.atoms.atoms(values.scores.wide_dim):
        return None
    size, whole = shape_of(node)[dim], shape_of(args["self"])[dim]
    if args["start"] in (None, 0) and same(size, whole - 1):
        return replace(value, labels=(*labels[:dim], values.scores.key_dim, *labels[dim + 1 :]))
    behind = static(size) == 1 and (args["start"] == -1 or _is_size(args["start"], whole - 1))
    if value.kind == "dS" and behind:
        return Value("dsink", (*labels[:dim], (), *labels[dim + 1 :]), value.factor)
    return None


def _beside_zero(values: Known, node: Node) -> Value | None:
    """Return the value of a gradient of probabilities that is extended by a column of zeros for the sink.

    Return that of a gradient of scores from which this column is cut off, too.
    """
    args, name = bind(node), op_name(node)
    if name == "aten::constant_pad_nd" and list(args["pad"]) == [0, -1]:
        cut = values.known.get(args["self"])
        if cut is None or cut.kind != "dS" or not values.scores.has_column:
            return None
        own = values.atoms.resolved(cut.labels)
        is_wide = own[-1] == values.atoms.atoms(values.scores.wide_dim)
        return replace(cut, labels=(*own[:-1], values.scores.key_dim)) if is_wide else None
    if name == "aten::slice_scatter":
        inner, fits = args["src"], number_of(args["self"]) == 0 and args["start"] in (None, 0)
        fits = fits and args["step"] == 1
        dim = args["dim"]
    else:
        inner, fits = args["self"], list(args["pad"]) == [0, 1] and number_of(args["value"]) in (0, None)
        dim = -1
    value = values.known.get(inner)
    if not fits or value is None or value.kind not in ("dD", "dP") or not values.scores.has_column:
        return None
    labels = values.atoms.resolved(value.labels)
    dim %= len(labels)
    wide = same(shape_of(node)[dim] - 1, shape_of(inner)[dim])
    if not wide or labels[dim] != values.atoms.atoms(values.scores.key_dim):
        return None
    return replace(value, labels=(*labels[:dim], values.scores.wide_dim, *labels[dim + 1 :]))


def _sizes(labels: Labels) -> list[Dim]:
    return [math.prod(atom.size for atom in dimension) for dimension in labels]


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 * max(abs(a), abs(b))


def _is_size(value: object, size: object) -> bool:
    value = value.meta.get("val") if isinstance(value, Node) else value
    return value is not None and same(value, size)  # type: ignore[arg-type]


RULES: dict[str, Callable[[Known, Node], Value | None]] = {
    "aten::amax": _maximum,
    "aten::max": _maximum_and_place,
    "aten::clamp": _at_least,
    "aten::clamp_min": _at_least,
    "aten::ge": _flag,
    "aten::eq": _flag,
    "aten::ne": _flag,
    "aten::abs": _flag,
    "aten::logical_not": _flag,
    "aten::any": _flag,
    "aten::all": _flag,
    "aten::mul": _mul,
    "aten::div": _div,
    "aten::sub": _sub,
    "aten::rsub": _rsub,
    "aten::add": _add,
    "prims::fma": _fma,
    "aten::sum": _sum,
    "aten::where": _where,
    "aten::scatter": _scatter,
    "aten::slice": _slice,
    "aten::slice_scatter": _beside_zero,
    "aten::constant_pad_nd": _beside_zero,
}
"""The rule of each operator, which returns None if the result is not a value of attention."""
