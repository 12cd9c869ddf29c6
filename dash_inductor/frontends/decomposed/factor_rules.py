"""Rules for factors of scores that are tensors, and for their gradients; see `value` for the kinds of values."""

from __future__ import annotations

from torch.fx import Node

from ...graph.nodes import bind
from .known import Known
from .labels import Atom, Labels
from .scores import uncast
from .value import Value


def product(values: Known, node: Node) -> Value | None:
    """Return which tensor a product with the factor, or with the scores that it multiplies, is; None for others."""
    factor = values.scores.factor
    if factor is None or len(node.args) != 2 or node.kwargs:
        return None
    for one, other in (node.args, node.args[::-1]):
        value = values.known.get(one) if isinstance(one, Node) else None
        if value is None or value.kind != values.of_scores[0] or not values.atoms.same(value.labels, factor.labels):
            continue
        if other is factor.tensor and not factor.inverse:
            return Value("f dS", value.labels, value.factor)
        if values.is_kind(other, "R / f / f") or (not factor.inverse and uncast(other) is uncast(factor.source)):
            return Value("R dS", value.labels, value.factor)
    return None


def quotient(values: Known, node: Node) -> Value | None:
    """Return which tensor a quotient by the factor is; None for other quotients."""
    factor = values.scores.factor
    if factor is None or not factor.inverse or len(node.args) != 2 or node.kwargs or node.args[1] is not factor.tensor:
        return None
    one = node.args[0]
    if one is factor.node or values.is_kind(one, "R / f"):
        return Value("R / f / f", factor.labels)
    if uncast(one) is uncast(factor.source):
        return Value("R / f", factor.labels)
    value = values.known.get(one) if isinstance(one, Node) else None
    if value is None or value.kind != values.of_scores[0] or not values.atoms.same(value.labels, factor.labels):
        return None
    return Value("f dS", value.labels, value.factor)


def total(values: Known, node: Node, value: Value) -> Value | None:
    """Return the value of a sum of the gradient of a factor; None if it has been summed to the size of the factor."""
    args, labels, factor = bind(node), values.atoms.resolved(value.labels), values.scores.factor
    if factor is None or (value.kind == "dfactor" and _atoms(labels) == _atoms(factor.own(values.atoms))):
        return None
    dims = args.get("dim") or range(len(labels))
    summed = {dim % len(labels) for dim in ([dims] if isinstance(dims, int) else dims)} if labels else set()
    if args.get("keepdim"):
        kept = tuple(() if dim in summed else own for dim, own in enumerate(labels))
    else:
        kept = tuple(own for dim, own in enumerate(labels) if dim not in summed)
    return Value("dfactor", kept, value.factor)


def _atoms(labels: Labels) -> set[Atom]:
    return {atom for dimension in labels for atom in dimension}
