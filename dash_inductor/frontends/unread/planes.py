"""Determines how each node of a graph depends on earlier products: its labelled dimensions, and where it is normalised.

A tensor is normalised along a dimension of a product if it is divided by a sum of itself along that dimension, or is
the exponential of a difference with the logarithm of such a sum.  Sums of squares, as in layer norms, do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor
from torch.fx import Node

from ...graph import sizes
from ...graph.nodes import bind, is_elementwise, op_name
from .dimensions import (
    NO_LABELS,
    Dims,
    Label,
    Labels,
    broadcast,
    cut,
    labels_of,
    only,
    plain_dims,
    relabelled,
    through,
)  # fmt: skip
from .products import Product, product_of, shape_of

Form = Literal["sum", "log", "minus log", "inverse"]


@dataclass(frozen=True)
class Plane:
    """What is known of a node's tensor: from which products its dimensions come, and whether it is a sum or normalised.

    Attributes:
        dims: its dimensions, with labels that name the products' dimensions from which they come.
        terms: the nodes of which it is a multiple or a part.
        sums: the labels along which it is a sum, each with the terms of the summed tensor.
        form: whether it is the sum itself, or its logarithm, negated logarithm or inverse.
        logs: the labels along which its exponential is normalised.
        normal: the labels along which it is normalised, each with the node that normalises.
    """

    dims: Dims
    terms: frozenset[Node] = frozenset()
    sums: Mapping[Label, frozenset[Node]] = field(default_factory=dict)
    form: Form = "sum"
    logs: Labels = NO_LABELS
    normal: Mapping[Label, Node] = field(default_factory=dict)

    @property
    def labels(self) -> Labels:
        """The union of the labels of `dims`: all dimensions of products from which this tensor's dimensions come."""
        return labels_of(self.dims)


@dataclass
class Planes:
    """What is known of each node's tensor (its `Plane`); `read` adds the nodes of a graph one by one, in graph order.

    Attributes:
        of: the plane of each node; most nodes have none.
        products: the nodes that compute products.
        divided: quotients of products by sums along dimensions that these products contract, each with the labels of
            these dimensions.
        constants: the nodes that depend on no input of the graph.
        contracted: the labels of the dimensions that each product contracts.
    """

    of: dict[Node, Plane] = field(default_factory=dict)
    products: dict[Node, Product] = field(default_factory=dict)
    divided: dict[Node, Labels] = field(default_factory=dict)
    constants: set[Node] = field(default_factory=set)
    contracted: dict[Node, Labels] = field(default_factory=dict)
    _numbers: dict[Any, int] = field(default_factory=dict)

    def read(self, node: Node) -> None:
        """Determine the `Plane` of a node and store it in `of`; all nodes before it must have been read."""
        name = op_name(node)
        if name in _FILLED or all(source in self.constants for source in node.all_input_nodes):
            self.constants.add(node)
            return
        planes = [self.of[source] for source in node.all_input_nodes if source in self.of]
        product = product_of(node)
        found = self._plane(name, node) if planes else None
        if product is not None:
            self.products[node] = product
            own = name in ("aten::sum", "aten::mul")
            found = self._of_product(node, product, found if own else None)
        if found is not None and (found.labels or found.sums):
            self.of[node] = found

    def _of_product(self, node: Node, product: Product, own: Plane | None) -> Plane:
        """Return the plane of a product, in which each free dimension gets a new label.

        Args:
            node: the node.
            product: the product that it computes.
            own: its plane as a sum or an elementwise product; None for other operators.
        """
        plane = own or self._mixed(node, product)
        for operand, side in zip(product.operands, (0, 1), strict=True):
            given = self.of.get(operand)
            if given is not None:
                dims = [given.dims[pair[side]] for pair in product.contracted if pair[side] is not None]  # type: ignore[index]
                self.contracted[node] = self.contracted.get(node, NO_LABELS) | labels_of(dims)
        found = list(plane.dims)
        for dim in product.free():
            found[dim] = relabelled(found[dim], frozenset({(node, dim)}))
        return replace(plane, dims=tuple(found), terms=plane.terms | {node})

    def _mixed(self, node: Node, product: Product) -> Plane:
        """Return a product's plane: a mixture of planes along another dimension (talking heads), or unlabelled."""
        plane = Plane(plain_dims(node, self._numbers))
        for operand, side in zip(product.operands, (0, 1), strict=True):
            given = self.of.get(operand)
            if given is None:
                continue
            shared = product.operands[1 - side] in self.of  # weights may be expanded for a batch
            alone = [None if shared and pair[1 - side] is not None else pair[side] for pair in product.kept]
            dims = [() if place is None else given.dims[place] for place in alone]
            kept = labels_of(dims)
            mixed = {label[0] for label in kept if any(other[0] is label[0] and other != label for other in kept)}
            if mixed:
                kept = frozenset(label for label in kept if label[0] in mixed)
                plane = replace(
                    plane,
                    dims=tuple(only(dim, kept) or own for dim, own in zip(dims, plane.dims, strict=True)),
                    logs=given.logs & kept,
                    normal={label: by for label, by in given.normal.items() if label in kept},
                )
        return plane

    def _plane(self, name: str, node: Node) -> Plane | None:
        if name in _SOFTMAXES:
            return self._softmax(name, node)
        if name in _REDUCTIONS:
            return self._reduced(name, node)
        source = node.args[0] if node.args else None
        given = self.of.get(source) if isinstance(source, Node) else None
        if name in ("aten::cat", "aten::stack"):
            return self._joined(node)
        if given is not None and isinstance(node.meta.get("val"), Tensor):
            dims = through(node, given.dims, self._numbers)
            if dims is not None:
                return replace(given, dims=dims, **self._column(name, given, dims))
        if name == "" and given is not None:  # getitem: one of several results
            same = len(given.dims) == len(shape_of(node))
            return replace(given, dims=cut(node, given.dims, self._numbers)) if same else None
        if name == "aten::unbind" and given is not None:
            gone = bind(node)["dim"] % len(given.dims)
            return replace(given, dims=tuple(own for dim, own in enumerate(given.dims) if dim != gone))
        if name in _SEVERAL:
            return given
        if not is_elementwise(node) or not isinstance(node.meta.get("val"), Tensor):
            return self._of_its_size(node)
        return self._elementwise(name.removeprefix("aten::"), node)

    def _of_its_size(self, node: Node) -> Plane | None:
        """Return the plane of an unsupported operator, such as a sort: that of an input of the same shape.

        Leading dimensions may differ, as where heads are chosen by their indices.
        """
        value = node.meta.get("val")
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        for source in node.all_input_nodes:
            plane = self.of.get(source)
            if plane is None or not isinstance(first, Tensor) or first.dim() != len(plane.dims):
                continue
            if sizes.same_all(shape_of(source)[-2:], first.shape[-2:]):
                return replace(plane, terms=plane.terms | {node})
        return None

    def _column(self, name: str, given: Plane, dims: Dims) -> dict[str, Any]:
        """Return the sum that one column of a product is, if the product multiplies by a column of ones."""
        if name not in ("aten::slice", "aten::select"):
            return {}
        sums = {
            label: given.terms
            for product, _ in given.labels - labels_of(dims)
            if product in self.products and any(map(self._has_constants, self.products[product].operands))
            for label in self.contracted.get(product, ())
        }
        return {"sums": sums} if sums else {}

    def _has_constants(self, node: Node) -> bool:
        """Return whether part of a tensor, or of the tensor that it is a view of, depends on no input."""
        while op_name(node) in _VIEWS:
            (node, *_) = node.all_input_nodes
        return op_name(node) in ("aten::cat", "aten::constant_pad_nd") and (
            len(node.all_input_nodes) < 2 or any(source in self.constants for source in node.all_input_nodes)
        )

    def _elementwise(self, name: str, node: Node) -> Plane | None:
        operands = [self.of.get(arg) if isinstance(arg, Node) else None for arg in node.args]
        known = [plane for plane in operands if plane is not None]
        rank = len(shape_of(node))
        if not known:
            return None
        whole = Plane(broadcast(rank, [plane.dims for plane in known]), frozenset({node}))
        if name in _TRANSPARENT:
            whole = replace(
                whole,
                terms=whole.terms.union(*(plane.terms for plane in known)),
                logs=NO_LABELS.union(*(plane.logs for plane in known)),
                normal={label: by for plane in known for label, by in plane.normal.items()},
                **_sums(known),
            )
        rule = _RULES.get(name)
        if rule is not None:
            return rule(self, node, whole, operands)
        if name not in _TRANSPARENT:
            whole = replace(whole, normal={label: by for plane in known for label, by in plane.normal.items()})
        return whole

    def _joined(self, node: Node) -> Plane | None:
        tensors = [arg for arg in node.all_input_nodes if arg in self.of]
        known = [self.of[arg] for arg in tensors]
        own = plain_dims(node, self._numbers)
        if any(len(plane.dims) != len(own) for plane in known):
            return None
        dims = tuple(
            relabelled(wide, labels_of([plane.dims[place] for plane in known])) for place, wide in enumerate(own)
        )
        normal = {label: by for plane in known for label, by in plane.normal.items()}
        terms = frozenset({node}).union(*(plane.terms for plane in known))
        return Plane(dims, terms, logs=NO_LABELS.union(*(plane.logs for plane in known)), normal=normal, **_sums(known))

    def _softmax(self, name: str, node: Node) -> Plane | None:
        given = self.of.get(node.args[0])  # type: ignore[arg-type]
        dim: Any = node.args[1]
        if given is None:
            return None
        labels = labels_of([given.dims[dim]])
        if "log" in name:
            return Plane(given.dims, frozenset({node}), logs=labels)
        return Plane(given.dims, frozenset({node}), normal=dict.fromkeys(labels, node))

    def _reduced(self, name: str, node: Node) -> Plane | None:
        args = bind(node)
        given = self.of.get(args["self"])
        dims = args.get("dim")
        if given is None or dims is None:
            return None
        rank = len(given.dims)
        gone = {dim % rank for dim in ([dims] if isinstance(dims, int) else dims)} or set(range(rank))
        left = tuple(() if dim in gone else own for dim, own in enumerate(given.dims))
        if not args.get("keepdim"):
            left = tuple(own for dim, own in enumerate(left) if dim not in gone)
        normal = given.normal if max(gone) < rank - 2 else {}  # a mean of heads multiplies value; one of rows does not
        if name not in _SUMS:
            return Plane(left, normal=normal)
        labels = labels_of([given.dims[dim] for dim in gone])
        sums = dict.fromkeys(labels, given.terms) | ({} if given.form != "sum" else dict(given.sums))
        return Plane(left, frozenset({node}), sums=sums, form=_SUMS[name], normal=normal)

    def quotient(self, node: Node, whole: Plane, one: Plane | None, by: Plane | None) -> Plane:
        """Return the plane of a division, normalised along dimensions where the divisor is a sum of the dividend.

        Args:
            node: the node that divides, or multiplies by an inverse.
            whole: the plane that the node has as an elementwise operator, to which the normalisation is added.
            one: the plane of the dividend; None if it has none.
            by: the plane of the divisor, if that is a sum; else None.
        """
        if one is None or by is None:
            return whole
        rank = max(len(one.dims), len(by.dims))
        wide, narrow = (((),) * (rank - len(plane.dims)) + plane.dims for plane in (one, by))
        along = labels_of([dim for dim, divisor in zip(wide, narrow, strict=True) if not divisor])
        normal = {label: node for label, terms in by.sums.items() if label in along and terms & one.terms}
        labels = one.labels
        after = NO_LABELS
        for product in {label[0] for label in labels - by.labels}:
            after |= self.contracted.get(product, NO_LABELS) & by.sums.keys()
        if after:
            self.divided[node] = after
        return replace(whole, normal={**whole.normal, **normal})


def _sums(known: Sequence[Plane]) -> dict[str, Any]:
    """Return the sums of planes that are added or multiplied, as fields of `Plane`."""
    found = [plane for plane in known if plane.sums]
    if len({plane.form for plane in found}) != 1:
        return {}
    sums: dict[Label, frozenset[Node]] = {}
    for plane in found:
        for label, terms in plane.sums.items():
            sums[label] = sums.get(label, frozenset()) | terms
    return {"sums": sums, "form": found[0].form}


Operands = Sequence[Plane | None]
Rule = Callable[[Planes, Node, Plane, Operands], Plane]


def _formed(forms: Mapping[Form, Form]) -> Callable[[Plane, Plane], dict[str, Any]]:
    """Return a function that maps the form of a sum as `forms` says; other forms are dropped."""

    def form(given: Plane, whole: Plane) -> dict[str, Any]:
        return {"sums": given.sums, "form": forms[given.form]} if given.sums and given.form in forms else {}

    return form


def _exp(planes: Planes, node: Node, whole: Plane, operands: Operands) -> Plane:
    (given,) = operands[:1]
    assert given is not None
    normal = dict.fromkeys(given.logs & given.labels, node)
    return replace(whole, normal=normal, **_formed({"log": "sum", "minus log": "inverse"})(given, whole))


def _log(planes: Planes, node: Node, whole: Plane, operands: Operands) -> Plane:
    (given,) = operands[:1]
    assert given is not None
    return replace(whole, logs=frozenset(given.normal), **_formed({"sum": "log", "inverse": "minus log"})(given, whole))


def _neg(planes: Planes, node: Node, whole: Plane, operands: Operands) -> Plane:
    (given,) = operands[:1]
    assert given is not None
    return replace(whole, **_formed({"log": "minus log", "minus log": "log", "sum": "sum"})(given, whole))


def _reciprocal(planes: Planes, node: Node, whole: Plane, operands: Operands) -> Plane:
    (given,) = operands[:1]
    assert given is not None
    if node.args[1:] not in ((), (-1,), (-1.0,)):  # another power
        return replace(whole, normal=given.normal)
    return replace(whole, **_formed({"sum": "inverse", "inverse": "sum"})(given, whole))


def _sub(planes: Planes, node: Node, whole: Plane, operands: Operands) -> Plane:
    one, other = (*operands, None, None)[:2]
    if one is not None and other is not None and other.form == "log":
        whole = replace(whole, logs=whole.logs | {label for label in other.sums if label in one.labels})
    minus = node.args[1]
    if isinstance(minus, Node) and len(shape_of(minus)) == len(whole.dims):  # e.g. a loss subtracts its target
        lost = [
            label
            for label in whole.normal
            if any(
                (one is None or label not in one.normal) != (other is None or label not in other.normal)
                and label in labels_of([dim]) and shape_of(minus)[place] != 1
                for place, dim in enumerate(whole.dims)
            )
        ]  # fmt: skip
        whole = replace(whole, normal={label: by for label, by in whole.normal.items() if label not in lost})
    return whole


def _div(planes: Planes, node: Node, whole: Plane, operands: Operands) -> Plane:
    one, by = (*operands, None, None)[:2]
    if by is None:
        return whole
    if one is None:
        whole = replace(whole, normal={}, sums={}, form="sum")
    else:
        whole = replace(whole, normal=one.normal, sums=one.sums, form=one.form)
    if by.form != "sum":
        return whole
    if one is None:
        whole = replace(whole, sums=by.sums, form="inverse")
    return planes.quotient(node, whole, one, by)


def _mul(planes: Planes, node: Node, whole: Plane, operands: Operands) -> Plane:
    one, other = (*operands, None, None)[:2]
    for plane, by in ((one, other), (other, one)):
        if by is not None and by.form == "inverse" and by.sums and plane is not None:
            whole = planes.quotient(node, whole, plane, by)
    return whole


_RULES: Mapping[str, Rule] = {
    "exp": _exp, "exp2": _exp, "log": _log, "log2": _log, "neg": _neg, "reciprocal": _reciprocal, "pow": _reciprocal,
    "sub": _sub, "div": _div, "mul": _mul,
}  # fmt: skip
_TRANSPARENT = frozenset({
    "add", "sub", "mul", "div", "where", "masked_fill", "clamp", "clamp_min", "maximum", "nan_to_num", "copy",
    "_to_copy", "prims::convert_element_type", "fill", "neg",
})  # fmt: skip
"""Elementwise operators that preserve normalisation and sums, up to a factor or a mask."""
_SOFTMAXES = ("aten::_softmax", "aten::_safe_softmax", "aten::softmax", "aten::_log_softmax", "aten::log_softmax")
_SUMS: Mapping[str, Form] = {"aten::sum": "sum", "aten::logsumexp": "log"}
_REDUCTIONS = (*_SUMS, "aten::amax", "aten::amin", "aten::max", "aten::mean", "aten::prod")
_FILLED = ("aten::full", "aten::full_like", "aten::ones", "aten::new_ones", "aten::new_full", "prims::iota")
"""Operators whose inputs only determine the shape of the result."""
_VIEWS = ("aten::view", "aten::reshape", "aten::expand", "aten::clone", "aten::permute", "aten::unsqueeze")
_SEVERAL = ("aten::native_dropout", "aten::split", "aten::split_with_sizes")
