"""Identifies the products of attention (scores, output, gradients), and the gradient of the output."""

from __future__ import annotations

from torch.fx import Node

from ...graph.nodes import op_name
from ...graph.sizes import same_all, static
from ...graph.temporaries import users
from .known import Known
from .labels import CAST, COPIES, VIEWS, Dimension, Labels, is_float, shape_of
from .operands import new_dimension, operand
from .scores import PRODUCTS, NotAttention, Stuck, constant_factor
from .value import Kind, Operand, Value


def product_of_scores(values: Known) -> None:
    """Record in `values` which operand of the product that computes the scores is query, and which is key.

    Raises:
        NotAttention: the softmax is not over a dimension of the product.
        Stuck: the softmax is over part of a dimension.
    """
    scores = values.scores.product
    assert scores is not None
    labels = values.atoms.resolved(values.scores.labels[scores])
    key_dim = values.keys
    lead, rows, columns = labels[:-2], labels[-2], labels[-1]
    one, other = scores.args[-2:]
    values.inner_dim = new_dimension(one, -1)
    left, right = (*lead, rows, values.inner_dim), (*lead, values.inner_dim, columns)
    if columns == key_dim:
        values.query_dim = rows
        operand(values, "Q", one, left)
        operand(values, "K", other, right)
    elif rows == key_dim:
        values.query_dim = columns
        operand(values, "K", one, left)
        operand(values, "Q", other, right)
    elif any(set(key_dim) < set(dimension) for dimension in (rows, columns)):
        raise Stuck(scores, "a product that mixes heads, or is the same for all of a batch")
    else:
        raise NotAttention


def is_outer(node: Node) -> bool:
    """Return whether a node multiplies a column by a row, as products with an inner size of 1 are decomposed."""
    factors = [arg for arg in node.args if isinstance(arg, Node) and is_float(arg)]
    if op_name(node) != "aten::mul" or len(factors) != 2:
        return False
    left, right = map(shape_of, factors)
    if not len(left) == len(right) == 3 or not same_all(left[:1], right[:1]):
        return False
    inner = static(left[2]) == static(right[1]) == 1
    return inner and static(left[1]) != 1 and static(right[2]) != 1


def product(values: Known, node: Node) -> Value | None:
    """Return which tensor of attention a matrix product computes, such as the output or dQ; None if it computes none.

    The product's other operand may be recorded as value or as the gradient of the output.

    Raises:
        NotAttention: the rows are not those of the scores, as in a mixture of experts, whose weights add up what each
            expert computes.
    """
    left, right = node.args
    assert isinstance(left, Node)
    assert isinstance(right, Node)
    for own, other, is_left in ((left, right, True), (right, left, False)):
        value = values.known.get(own)
        if value is not None and len(value.labels) == len(shape_of(node)):
            found = _product_with(values, node, value, other, is_left)
            if found is not None:
                return found
    return _of_gradient(values, node, left, right)


def _product_with(values: Known, node: Node, value: Value, other: Node, is_left: bool) -> Value | None:
    """Return the value of a product of probabilities or scores, or of their gradient, with an operand.

    Return None if it has none.
    """
    labels = values.atoms.resolved(value.labels)
    lead, (outer, inner) = labels[:-2], labels[-2:] if is_left else labels[:-3:-1]

    def of(end: Dimension) -> Labels:
        """Return the labels of the matmul's other operand if `end` is its dimension that is not contracted."""
        return (*lead, inner, end) if is_left else (*lead, end, inner)

    def result(kind: Kind, end: Dimension, factor: float) -> Value | None:
        if kind in values.results:
            return None
        values.results[kind] = node
        return Value(kind, (*lead, outer, end) if is_left else (*lead, end, outer), factor)

    keys, rows = values.keys, values.rows
    over_rows = set(inner) == set(rows)  # grouped heads may come before or after queries
    if value.kind == ("D" if values.random else "P"):
        if node not in values.of_backward and inner == keys:
            if set(outer) != set(rows):
                raise NotAttention
            if "O" in values.results:
                return None
            values.value_dim = new_dimension(other, -1 if is_left else -2)
            operand(values, "V", other, of(values.value_dim))
            return result("O", values.value_dim, value.factor)
        if node in values.of_backward and over_rows and outer == keys and "V" in values.named:
            if "G" not in values.named:
                operand(values, "G", other, of(values.value_dim))
            gradient = _has(values, "G", other, of(values.value_dim))
            return None if gradient is None else result("dV", values.value_dim, value.factor * gradient.factor)
    if value.kind == values.of_scores[1]:
        of_query, of_key = inner == keys and set(outer) == set(rows), over_rows and outer == keys
        for kind, source, fits in (("dQ", "K", of_query), ("dK", "Q", of_key)):
            found = _has(values, source, other, of(values.inner_dim))  # type: ignore[arg-type]
            if fits and found is not None:
                return result(kind, values.inner_dim, value.factor * found.factor)  # type: ignore[arg-type]
    return None


def _of_gradient(values: Known, node: Node, left: Node, right: Node) -> Value | None:
    """Return the gradient of the probabilities if the product is that of the output's gradient and value; else None."""
    for one, other in (("G", "V"), ("V", "G")):
        a = values.named.get(one, {}).get(left)  # type: ignore[call-overload]
        b = values.named.get(other, {}).get(right)  # type: ignore[call-overload]
        if a is None or b is None:
            continue
        of_left, of_right = values.atoms.resolved(a.labels), values.atoms.resolved(b.labels)
        fits = of_left[:-2] == of_right[:-2] and of_left[-1] == of_right[-2] == values.atoms.atoms(values.value_dim)
        if fits:
            kind: Kind = "dD" if values.random else "dP"
            return Value(kind, (*of_left[:-1], of_right[-1]), a.factor * b.factor)
    return None


def _has(values: Known, kind: Operand, node: Node, labels: Labels) -> Value | None:
    """Return the value of an operand that `node` holds with these labels; None if it does not."""
    value = values.named.get(kind, {}).get(node)
    return value if value is not None and values.atoms.same(value.labels, labels) else None


def look_for_gradient(values: Known) -> None:
    """Find and record the gradient of the output in a graph that computes no gradient of value.

    It is the factor of value in the product from which the gradient of the probabilities is computed.
    """
    for node in list(values.known):
        for user in users(node):
            if user in values.known or user not in values.of_backward or op_name(user) != "aten::mul":
                continue
            for arg in user.args:
                if values.known[node].kind == "P" and isinstance(arg, Node) and arg not in values.known:
                    _gradient_behind(values, arg, values.known[node].labels)


def _gradient_behind(values: Known, node: Node, labels: Labels | None) -> None:
    """Follow the gradient of the probabilities back to its product; `labels` are those of the node, None if unknown."""
    while op_name(node) not in PRODUCTS:
        factor = constant_factor(node)
        if factor is not None:
            node = factor[0]
        elif op_name(node) == "aten::mul" and any(values.is_kind(arg, "keep") for arg in node.args):
            (node,) = [arg for arg in node.args if isinstance(arg, Node) and not values.is_kind(arg, "keep")]
        elif op_name(node) == "aten::slice_scatter" and isinstance(node.args[1], Node):
            node, labels = node.args[1], None
        elif op_name(node) in (*VIEWS, *COPIES, CAST, "aten::permute", "aten::expand", "aten::constant_pad_nd"):
            labels = None if labels is None else values.atoms.back(node, labels)
            assert isinstance(node.args[0], Node)
            node = node.args[0]
        else:
            return
    _take_gradient(values, node, labels)


def _take_gradient(values: Known, node: Node, planes: Labels | None) -> None:
    """Record the other operand of a product with value as the gradient of the output.

    Args:
        values: what is known of the attention.
        node: the product.
        planes: the labels of the product; None if they are unknown.
    """
    if planes is not None:
        rows = [d for d in values.atoms.resolved(planes)[-2:] if set(d) == set(values.rows)]
    else:  # several atoms may be in another order
        rows = [values.rows] if len(values.rows) < 2 else []
    left, right = node.args
    assert isinstance(left, Node)
    assert isinstance(right, Node)
    for value, other, is_left in ((left, right, True), (right, left, False)):
        named = values.named["V"].get(value)
        if named is None or "G" in values.named or not rows:
            continue
        labels = values.atoms.resolved(named.labels)
        lead, (outer, inner) = labels[:-2], labels[-2:] if is_left else labels[:-3:-1]
        if (outer, inner) == (values.keys, values.atoms.atoms(values.value_dim)):
            operand(values, "G", other, (*lead, inner, rows[0]) if is_left else (*lead, rows[0], inner))
            values.push(node)
