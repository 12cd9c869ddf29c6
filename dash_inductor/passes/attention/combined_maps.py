"""Reads the left operand of a product as a combination of probabilities: sums, factors, parts and views of softmaxes.

A *form* says what a tensor is multiplied by in the operand, part by part.  The gradient of the operand, multiplied by
the form of a softmax's probabilities, is the gradient of these probabilities.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from ...frontends.decomposed.labels import CAST, COPIES, VIEWS, is_float, shape_of, shows_bits
from ...frontends.decomposed.scores import constant_factor, number_of
from ...frontends.unread.words import SUMS
from ...graph.nodes import bind, called, op_name
from ...graph.numbers import holds_all
from ...graph.sizes import Dim, same, same_all, static

_PARTS = ("aten::select", "aten::slice", "aten::split", "aten::split_with_sizes", "aten::unbind")
Part = tuple[int, int, int, str]
"""Part of a tensor along a dimension: the dimension, the first index, the length, and the tensor's leading sizes."""
Scale = tuple[float, tuple[tuple[object, str], ...]]
"""A number times tensors, each with the leading sizes of what it multiplies."""
Form = dict[Part | None, Scale]
"""How a tensor is scaled, by part; None stands for the whole."""


@dataclass(frozen=True)
class Edge:
    """A summand of a step of the program: ``number * tensor * part of source``."""

    source: Node
    number: float = 1.0
    tensor: Node | None = None
    part: Part | None = None


@dataclass(frozen=True)
class Combination:
    """A product whose left operand is a combination of probabilities.

    Attributes:
        product: the product.
        edges: for each step from the operand back to the probabilities, latest first, its summands; the probabilities
            have none.
        readers: for each of these nodes, the steps that read it.
        forms: what each is multiplied by, in the operand.
    """

    product: Node
    edges: Mapping[Node, list[Edge]]
    readers: Mapping[Node, list[tuple[Node, Edge]]]
    forms: Mapping[Node, Form]

    @staticmethod
    def of(product: Node, places: Mapping[Node, int]) -> Combination | None:
        """Return the combination that a product reads; None if it reads none."""
        root = product.args[0]
        assert isinstance(root, Node)
        edges: dict[Node, list[Edge]] = {}
        readers: dict[Node, list[tuple[Node, Edge]]] = {root: []}
        forms: dict[Node, Form] = {}
        left = [(0, root)]
        while left:
            _, node = heapq.heappop(left)
            form = _form_of(readers[node], forms, node)
            if form is None:
                return None
            forms[node], edges[node] = form, _edges(node)
            holds = holds_all(node.meta["val"].dtype, product.meta["val"].dtype)
            if not holds or not (edges[node] or softmax_of(node)):
                return None
            for edge in edges[node]:
                if edge.source not in readers:
                    readers[edge.source] = []
                    heapq.heappush(left, (-places[edge.source], edge.source))
                readers[edge.source].append((node, edge))
        is_sum = any(len(found) > 1 for found in edges.values())
        return Combination(product, edges, readers, forms) if is_sum else None

    @property
    def root(self) -> Node:
        """The left operand."""
        return next(iter(self.edges))

    @property
    def maps(self) -> list[Node]:
        """The probabilities of each softmax."""
        return [node for node, edges in self.edges.items() if not edges]


def _edges(node: Node) -> list[Edge]:
    """Return the summands of a step that is linear and does the same with all keys; [] for any other node."""
    name, source = op_name(node), node.args[0] if node.args else None
    if not is_float(node) or not isinstance(source, Node):
        return []
    factor = constant_factor(node)
    if factor is not None:
        return [Edge(*factor)]
    viewed = _viewed(node)
    if viewed is not None:
        return [Edge(viewed)]
    if len(node.args) == 2 and not node.kwargs and name in (*SUMS, "aten::mul"):
        one, other = node.args
        fits = [is_float(arg) and same_all(shape_of(arg), shape_of(node)) for arg in (one, other)]  # type: ignore[arg-type]
        if name in SUMS:
            return [Edge(one), Edge(other, 1.0 if name == "aten::add" else -1.0)] if all(fits) else []  # type: ignore[arg-type]
        for fit, scaled, tensor in ((fits[0], one, other), (fits[1], other, one)):
            if fit and is_float(tensor) and _is_of_rows(tensor):  # type: ignore[arg-type]
                return [Edge(scaled, tensor=tensor)]  # type: ignore[arg-type]
        return []
    part = _part(node)
    return [] if part is None else [part]


def _is_of_rows(tensor: Node) -> bool:
    """Return whether a tensor, broadcast to the probabilities, does not vary along the keys."""
    return not shape_of(tensor) or static(shape_of(tensor)[-1]) == 1


def _viewed(node: Node) -> Node | None:
    """Return the tensor whose elements a node has in the same order, with the same rows and keys; None if it has none.

    Several views may lie in between, as those of `torch.einsum`, which adds a dimension and removes it again.
    """
    source: Any = node
    while op_name(source) in VIEWS and not shows_bits(source) and is_float(source.args[0]):
        source = source.args[0]
        if same_all(shape_of(source)[-2:], shape_of(node)[-2:]):
            return source  # type: ignore[no-any-return]
    name, source = op_name(node), node.args[0]
    alike = name in (*COPIES, CAST) or (name == "aten::expand" and same_all(shape_of(source), shape_of(node)))
    return source if alike and is_float(source) else None


def _part(node: Node) -> Edge | None:
    """Return the summand of a node that is part of another one along one of the leading dimensions."""
    chosen = node.args[0] if node.target is operator.getitem else node
    if not isinstance(chosen, Node) or op_name(chosen) not in _PARTS:
        return None
    args = bind(chosen)
    source, dim = args["self"], args["dim"] % len(shape_of(args["self"]))
    alone = len(shape_of(node)) < len(shape_of(source))
    if chosen is node:
        start = args.get("index", args.get("start")) or 0
    else:
        start = sum(1 if alone else value.shape[dim] for value in chosen.meta["val"][: node.args[1]])
    if args.get("step", 1) != 1:
        return None
    found = _placed(source, dim, start, 1 if alone else shape_of(node)[dim])
    return None if found is None else Edge(source, part=found)


def _placed(whole: Node, dim: int, start: object, length: Dim) -> Part | None:
    """Return the part of a tensor that begins at `start`; None if it is not one along static leading dimensions."""
    size, length = static(shape_of(whole)[dim]), static(length)  # type: ignore[assignment]
    if dim >= len(shape_of(whole)) - 2 or size is None or not isinstance(start, int) or not isinstance(length, int):
        return None
    return dim, max(start + size, 0) if start < 0 else start, length, _lead(whole)


def _lead(node: Node) -> str:
    return str(list(shape_of(node)[:-2]))


def uncast(node: object) -> object:
    """Return the node before copies, and before conversions between the floating-point dtypes of mixed precision."""
    while isinstance(node, Node) and op_name(node) in (CAST, *COPIES) and is_float(node) and is_float(node.args[0]):
        if node.meta["val"].dtype.itemsize < 2:  # an 8-bit number is another one
            break
        node = node.args[0]
    return node


def softmax_of(node: object) -> Node | None:
    """Return the quotient of the softmax from which probabilities are computed, as by dropout; None without one."""
    node = uncast(node)
    if not isinstance(node, Node):
        return None
    if op_name(node) == "aten::div" and isinstance(node.args[0], Node) and op_name(node.args[0]) == "aten::exp":
        return node
    if op_name(node) not in ("aten::mul", "aten::where"):
        return None
    return next(filter(None, map(softmax_of, node.args)), None)


def _form_of(readers: list[tuple[Node, Edge]], forms: Mapping[Node, Form], node: Node) -> Form | None:
    """Return the form of a node that these steps read; None if it is read twice, or not as a whole."""
    if not readers:
        return {None: (1.0, ())}
    if readers[0][1].part is None:
        (reader, edge), *others = readers
        return None if others else _scaled(forms[reader], edge.number, edge.tensor, node)
    found = {edge.part: forms[reader].get(None) for reader, edge in readers}
    return _covering(found, node) if len(found) == len(readers) else None


def _covering(parts: Mapping[Part | None, Scale | None], whole: Node) -> Form | None:
    """Return the form that consists of these parts if they are all of `whole`, each once."""
    place, dims, form = 0, set[int](), dict[Part | None, Scale]()
    for part in sorted(filter(None, parts)):
        scale = parts[part]
        if part[1] != place or scale is None:
            return None
        place, form[part] = place + part[2], scale
        dims.add(part[0])
    complete = len(form) == len(parts) and len(dims) == 1 and same(shape_of(whole)[min(dims)], place)
    return form if complete else None


def _scaled(form: Form, number: float, tensor: Node | None, node: Node) -> Form | None:
    """Return the form of what a number and a tensor multiply.

    Return None for a tensor that multiplies several parts, and for a number that is not finite.
    """
    if not math.isfinite(number):
        return None
    if tensor is None:
        return {part: (number * own, tensors) for part, (own, tensors) in form.items()}
    if list(form) != [None]:
        return None
    own, tensors = form[None]
    key = uncast(tensor), "" if all(static(n) == 1 for n in shape_of(tensor)) else _lead(node)
    return {None: (number * own, tuple(sorted((*tensors, key), key=str)))}


def same_form(a: Form, b: Form) -> bool:
    """Return whether two forms are the same; their numbers may differ by the order in which factors were multiplied."""
    return a.keys() == b.keys() and all(
        a[part][1] == b[part][1] and math.isclose(a[part][0], b[part][0], rel_tol=1e-6) for part in a
    )


def form_of_gradient(node: Node, forms: Mapping[Node, Form]) -> Form | None:
    """Return the form of a step of the backward that reads nodes of these forms; None if it has none."""
    joined = next((part for part in (node, *node.all_input_nodes[:1]) if op_name(part) == "aten::cat"), None)
    if joined is not None and (joined is node or op_name(node) in VIEWS):
        found = _joined(node, joined, forms)
        if found is not None:
            return found
    if called(node) is None:
        return None
    name, own = op_name(node), [forms[source] for source in node.all_input_nodes if source in forms]
    if name == "aten::add" and own and not node.kwargs:
        parts = [part for form in own for part in form]
        return own[0] | own[-1] if len(own) == 2 and len(parts) == len(set(parts)) else None
    if name in ("aten::select_scatter", "aten::slice_scatter"):
        args = bind(node)
        dim, start = args["dim"] % len(shape_of(node)), args.get("index", args.get("start")) or 0
        length = 1 if "index" in args else shape_of(args["src"])[dim]
        part = _placed(node, dim, start, length) if args.get("step", 1) == 1 else None
        fits = args["src"] in forms and number_of(args["self"]) == 0 and part is not None
        scale = forms[args["src"]].get(None) if fits else None
        return None if scale is None else {part: scale}
    if name == "aten::expand" and own:
        found = _repeated(node, own[0])
        if found is not None:
            return found
    edges = [edge for edge in _edges(node) if edge.part is None]
    if len(edges) != 1 or edges[0].source not in forms or edges[0].tensor in forms:
        return None
    return _scaled(forms[edges[0].source], edges[0].number, edges[0].tensor, node)


def _repeated(node: Node, form: Form) -> Form | None:
    """Return the form of a tensor that is expanded along one leading dimension, as the gradient of a sum is."""
    before, after = shape_of(node.args[0]), shape_of(node)  # type: ignore[arg-type]
    longer = [dim for dim, size in enumerate(after) if len(before) == len(after) and not same(before[dim], size)]
    if len(longer) != 1 or list(form) != [None] or static(before[longer[0]]) != 1:
        return None
    parts = [_placed(node, longer[0], place, 1) for place in range(static(after[longer[0]]) or 0)]
    return {part: form[None] for part in parts if part is not None} or None


def _joined(node: Node, joined: Node, forms: Mapping[Node, Form]) -> Form | None:
    """Return the form of concatenated tensors, or of a view that gives each an index of its own, as of a stack."""
    args = bind(joined)
    tensors, shape = args["tensors"], list(shape_of(args["tensors"][0]))
    dim, place, form = args["dim"] % len(shape), 0, dict[Part | None, Scale]()
    if node is not joined and not same_all(shape_of(node), [*shape[:dim], len(tensors), *shape[dim:]]):
        return None
    for tensor in tensors:
        part = _placed(node, dim, place, shape_of(tensor)[dim] if node is joined else 1)
        scale = forms.get(tensor, {}).get(None)
        if part is None or scale is None or (node is not joined and not same_all(shape_of(tensor), shape)):
            return None
        place, form[part] = place + part[2], scale
    return form
