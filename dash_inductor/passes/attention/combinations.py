"""Splits a product of combined probabilities, as of differential attention, into one product for each softmax.

A program computes ``(P1 - c * P2) @ V``, a product of both maps, which belongs to no attention alone.  With X the sum
of s_i * P_i, where no factor s_i varies along the keys, and G the gradient of the product, these are equal:

    X V = sum of s_i * (P_i V)          X^T G = sum of P_i^T (s_i * G)
    s_i * (G V^T) = (s_i * G) V^T       sum over keys of (G V^T) * P_i = sum over the head dim of G * (P_i V)

`split` writes the right sides in place of the left ones, which autograd has left in the graph, so that each softmax is
an attention like any other.  Every step is an identity of one tensor: what is read otherwise stays in the graph, and
then the attention pass keeps the site, and undoes the split.
"""

from __future__ import annotations

import functools
import heapq
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ...frontends.decomposed.labels import CAST, COPIES, VIEWS, is_float, permutation, shape_of, shows_bits
from ...frontends.decomposed.scores import PRODUCTS, constant_factor, number_of
from ...frontends.unread.words import SUMS
from ...graph.backward import of_backward
from ...graph.emit import Emitter, erase_dead
from ...graph.nodes import bind, called, op_name
from ...graph.numbers import holds_all
from ...graph.sizes import Dim, same, same_all, static

aten, prims = torch.ops.aten, torch.ops.prims

SPLIT = "(P1 - c * P2) @ V as P1 @ V - c * (P2 @ V)"
"""Describes a product that was split."""
_WHOLE = "dash_inductor_whole"
_PARTS = ("aten::select", "aten::slice", "aten::split", "aten::split_with_sizes", "aten::unbind")
Part = tuple[int, int, int, str]
"""Part of a tensor along a dimension: the dimension, the first index, the length, and the tensor's leading sizes."""
Scale = tuple[float, tuple[tuple[object, str], ...]]
"""A number times tensors, each with the leading sizes of what it multiplies."""
Form = dict[Part | None, Scale]
"""How a tensor is scaled, by part; None stands for the whole."""


@dataclass(frozen=True)
class Split:
    """A product that was split.

    Attributes:
        name: the name that the product had.
        softmaxes: the nodes of the softmaxes.
        products: the products in its place, of the forward and of the backward.
    """

    name: str
    softmaxes: tuple[Node, ...]
    products: tuple[Node, ...]


def split(graph: Graph) -> list[Split]:
    """Split the products of combined probabilities in a graph, apart from those that `keep_whole` marks."""
    backward = of_backward(graph)
    places = {node: place for place, node in enumerate(graph.nodes)}
    products = [node for node in places if op_name(node) in PRODUCTS and node not in backward]
    found = (_Combination.of(node, places) for node in products if _WHOLE not in node.meta)
    return [_Splitting(each, Emitter(graph), backward).run() for each in found if each is not None]


def keep_whole(graph: Graph, splits: Collection[Split]) -> None:
    """Mark products that `split` shall not split again, in a graph in which they are whole."""
    names = {each.name for each in splits}
    for node in graph.nodes:
        if node.name in names:
            node.meta[_WHOLE] = True


@dataclass(frozen=True)
class _Edge:
    """A summand of a step of the program: ``number * tensor * part of source``."""

    source: Node
    number: float = 1.0
    tensor: Node | None = None
    part: Part | None = None


@dataclass(frozen=True)
class _Combination:
    """A product whose left operand is a combination of probabilities.

    Attributes:
        product: the product.
        edges: for each step from the operand back to the probabilities, latest first, its summands; the probabilities
            have none.
        readers: for each of these nodes, the steps that read it.
        forms: what each is multiplied by, in the operand.
    """

    product: Node
    edges: Mapping[Node, list[_Edge]]
    readers: Mapping[Node, list[tuple[Node, _Edge]]]
    forms: Mapping[Node, Form]

    @staticmethod
    def of(product: Node, places: Mapping[Node, int]) -> _Combination | None:
        """Return the combination that a product reads; None if it reads none."""
        root = product.args[0]
        assert isinstance(root, Node)
        edges: dict[Node, list[_Edge]] = {}
        readers: dict[Node, list[tuple[Node, _Edge]]] = {root: []}
        forms: dict[Node, Form] = {}
        left = [(0, root)]
        while left:
            _, node = heapq.heappop(left)
            form = _form_of(readers[node], forms, node)
            if form is None:
                return None
            forms[node], edges[node] = form, _edges(node)
            holds = holds_all(node.meta["val"].dtype, product.meta["val"].dtype)
            if not holds or not (edges[node] or _softmax_of(node)):
                return None
            for edge in edges[node]:
                if edge.source not in readers:
                    readers[edge.source] = []
                    heapq.heappush(left, (-places[edge.source], edge.source))
                readers[edge.source].append((node, edge))
        is_sum = any(len(found) > 1 for found in edges.values())
        return _Combination(product, edges, readers, forms) if is_sum else None

    @property
    def root(self) -> Node:
        """The left operand."""
        return next(iter(self.edges))

    @property
    def maps(self) -> list[Node]:
        """The probabilities of each softmax."""
        return [node for node, edges in self.edges.items() if not edges]


def _edges(node: Node) -> list[_Edge]:
    """Return the summands of a step that is linear and does the same with all keys; [] for any other node."""
    name, source = op_name(node), node.args[0] if node.args else None
    if not is_float(node) or not isinstance(source, Node):
        return []
    factor = constant_factor(node)
    if factor is not None:
        return [_Edge(*factor)]
    viewed = _viewed(node)
    if viewed is not None:
        return [_Edge(viewed)]
    if len(node.args) == 2 and not node.kwargs and name in (*SUMS, "aten::mul"):
        one, other = node.args
        fits = [is_float(arg) and same_all(shape_of(arg), shape_of(node)) for arg in (one, other)]  # type: ignore[arg-type]
        if name in SUMS:
            return [_Edge(one), _Edge(other, 1.0 if name == "aten::add" else -1.0)] if all(fits) else []  # type: ignore[arg-type]
        for fit, scaled, tensor in ((fits[0], one, other), (fits[1], other, one)):
            if fit and is_float(tensor) and _is_of_rows(tensor):  # type: ignore[arg-type]
                return [_Edge(scaled, tensor=tensor)]  # type: ignore[arg-type]
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


def _part(node: Node) -> _Edge | None:
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
    return None if found is None else _Edge(source, part=found)


def _placed(whole: Node, dim: int, start: object, length: Dim) -> Part | None:
    """Return the part of a tensor that begins at `start`; None if it is not one along static leading dimensions."""
    size, length = static(shape_of(whole)[dim]), static(length)  # type: ignore[assignment]
    if dim >= len(shape_of(whole)) - 2 or size is None or not isinstance(start, int) or not isinstance(length, int):
        return None
    return dim, max(start + size, 0) if start < 0 else start, length, _lead(whole)


def _lead(node: Node) -> str:
    return str(list(shape_of(node)[:-2]))


def _uncast(node: object) -> object:
    """Return the node before copies, and before conversions between the floating-point dtypes of mixed precision."""
    while isinstance(node, Node) and op_name(node) in (CAST, *COPIES) and is_float(node) and is_float(node.args[0]):
        if node.meta["val"].dtype.itemsize < 2:  # an 8-bit number is another one
            break
        node = node.args[0]
    return node


def _softmax_of(node: object) -> Node | None:
    """Return the quotient of the softmax from which probabilities are computed, as by dropout; None without one."""
    node = _uncast(node)
    if not isinstance(node, Node):
        return None
    if op_name(node) == "aten::div" and isinstance(node.args[0], Node) and op_name(node.args[0]) == "aten::exp":
        return node
    if op_name(node) not in ("aten::mul", "aten::where"):
        return None
    return next(filter(None, map(_softmax_of, node.args)), None)


def _form_of(readers: list[tuple[Node, _Edge]], forms: Mapping[Node, Form], node: Node) -> Form | None:
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
    key = _uncast(tensor), "" if all(static(n) == 1 for n in shape_of(tensor)) else _lead(node)
    return {None: (number * own, tuple(sorted((*tensors, key), key=str)))}


def _same_form(a: Form, b: Form) -> bool:
    """Return whether two forms are the same; their numbers may differ by the order in which factors were multiplied."""
    return a.keys() == b.keys() and all(
        a[part][1] == b[part][1] and math.isclose(a[part][0], b[part][0], rel_tol=1e-6) for part in a
    )


class _Splitting:
    """Splits one product, and the products of its gradient.

    Sums and factors are computed in float32 at least, and rounded where a product reads them.
    """

    def __init__(self, own: _Combination, emitter: Emitter, backward: Set[Node]) -> None:
        self._own, self._emitter, self._backward = own, emitter, backward
        self._before = self._like = own.product
        self._known: dict[tuple[Node, Node, bool], Node] = {}

    def run(self) -> Split:
        own, product = self._own, self._own.product
        value = product.args[1]
        assert isinstance(value, Node)
        maps = {node: self._cast(node, value) for node in own.maps}
        wide = {node: self._down(node, value, scaled=False) for node in own.maps}
        outputs = {node: self._wide(self._product(torch.bmm, maps[node], wide[node], node)) for node in own.maps}
        replaced, gradients = [(product, self._up(own.root, outputs, scaled=True))], list[Node]()
        for gradient, of_value, of_map in self._backwards(value):
            self._before = self._like = min(filter(None, (of_map, of_value)))
            rows = {node: self._cast(self._down(node, gradient, scaled=True), value) for node in own.maps}
            if of_map is not None:
                self._like = of_map
                forms = self._forms(of_map)
                gradients += forms
                replaced += self._split_gradient(forms, gradient, outputs)
                self._split_maps(forms, rows, wide)
            if of_value is not None:
                self._like = of_value
                parts = {node: self._wide(self._product(_of_value, maps[node], rows[node], node)) for node in own.maps}
                replaced.append((of_value, self._up(own.root, parts, scaled=False)))
        for old, new in replaced:
            old.replace_all_uses_with(self._emitter.laid_out(self._cast(new, old), like=old))
        erase_dead(self._emitter.graph, [*gradients, *(old for old, _ in replaced)])
        softmaxes = tuple(filter(None, map(_softmax_of, own.maps)))
        products = tuple(node for node in self._emitter.created if op_name(node) in PRODUCTS)
        return Split(product.name, softmaxes, products)

    def _backwards(self, value: Node) -> Iterator[tuple[Node, Node | None, Node | None]]:
        """Yield gradients of the product, each with the products of the gradient of value, and of the left operand."""
        found: dict[Node, list[Node | None]] = {}
        for source, place in ((self._own.root, 0), (value, 1)):
            for swapped in filter(_swaps, source.users):
                for user in swapped.users:
                    if op_name(user) in PRODUCTS and user in self._backward and user.args[place] is swapped:
                        found.setdefault(user.args[1 - place], [None, None])[place] = user  # type: ignore[arg-type]
        of_value = {node: pair for node, pair in found.items() if pair[0] is not None}
        for gradient, (first, second) in (of_value or found).items():
            yield gradient, first, second

    def _up(self, node: Node, known: dict[Node, Node], *, scaled: bool) -> Node:
        """Return the combination of tensors that `known` has for the probabilities, as the program combines these.

        Args:
            node: a step of the combination.
            known: the tensors of the probabilities and of steps; extended.
            scaled: whether factors count.
        """
        if node not in known:
            terms = []
            for edge in self._own.edges[node]:
                term = self._up(edge.source, known, scaled=scaled)
                if edge.part is not None:
                    dim, start, length, _ = edge.part
                    term = self._call(aten.slice.Tensor, term, dim, start, start + length)
                term = self._sized(term, node)
                terms.append(self._times_finite(term, edge) if scaled else term)
            known[node] = functools.reduce(functools.partial(self._call, aten.add.Tensor), terms)
        return known[node]

    def _down(self, node: Node, start: Node, *, scaled: bool) -> Node:
        """Return what of `start`, which has the leading dimensions of the operand, belongs to a step.

        Args:
            node: the step.
            start: the gradient of the product, or value.
            scaled: whether factors count.
        """
        key = node, start, scaled
        if key not in self._known:
            parts = []
            for reader, edge in sorted(self._own.readers[node], key=lambda pair: pair[1].part or (0, 0)):
                found = self._down(reader, start, scaled=scaled)
                found = self._times(found, edge) if scaled else found
                if edge.part is None:
                    found = self._sized(found, node)
                elif len(shape_of(reader)) < len(shape_of(node)):
                    found = self._call(aten.unsqueeze.default, found, edge.part[0])
                parts.append(found)
            dims = {edge.part[0] for _, edge in self._own.readers[node] if edge.part is not None}
            if dims:
                self._known[key] = self._call(aten.cat.default, parts, *dims)
            else:
                self._known[key] = parts[0] if parts else self._wide(start) if scaled else start
        return self._known[key]

    def _forms(self, product: Node) -> dict[Node, Form]:
        """Return the nodes that hold the gradient of the operand, which `product` computes, with factors, by part."""
        forms: dict[Node, Form] = {product: {None: (1.0, ())}}
        node = product
        while node.op != "output":
            node = node.next
            form = _form_of_gradient(node, forms)
            if form is not None and holds_all(node.meta["val"].dtype, product.meta["val"].dtype):
                forms[node] = form
        return forms

    def _split_gradient(
        self, forms: Mapping[Node, Form], gradient: Node, outputs: dict[Node, Node]
    ) -> Iterator[tuple[Node, Node]]:
        """Yield the sums over keys of a gradient times probabilities, with what is computed in their place."""
        for step, edge in ((step, edge) for step, edges in self._own.edges.items() for edge in edges if edge.tensor):
            for node, form in forms.items():
                for user in node.users:
                    other = [arg for arg in user.args if arg is not node]
                    fits = (
                        op_name(user) == "aten::mul" and len(other) == 1 and _uncast(other[0]) is _uncast(edge.source)
                    )
                    fits = fits and _same_form(form, self._own.forms[step])
                    if not fits or not same_all(shape_of(user), shape_of(step)) or not all(map(_adds_keys, user.users)):
                        continue
                    rows = self._sized(self._up(edge.source, outputs, scaled=True), step)
                    rows = self._call(aten.mul.Tensor, self._down(step, gradient, scaled=True), rows)
                    for total in user.users:
                        yield total, self._call(total.target, rows, *total.args[1:], **total.kwargs)  # type: ignore[arg-type]

    def _split_maps(self, forms: Mapping[Node, Form], rows: Mapping[Node, Node], wide: Mapping[Node, Node]) -> None:
        """Let the backward of each softmax read a product of its own."""
        products: dict[Node, Node] = {}
        for node, form in forms.items():
            for user in [user for user in node.users if user not in forms]:
                alike = [own for own in rows if _same_form(form, self._own.forms[own])]
                read = set(filter(None, (_softmax_of(arg) for arg in user.args if arg is not node)))
                if read:  # sums, and other products with the same value, have maps whose gradients are one node
                    alike = [own for own in alike if _softmax_of(own) in read]
                if len(alike) != 1 or not same_all(shape_of(alike[0]), shape_of(node)):
                    continue
                (own,) = alike
                if own not in products:
                    products[own] = self._product(_of_map, rows[own], wide[own], own)
                user.replace_input_with(node, self._cast(products[own], node))

    def _times(self, node: Node, edge: _Edge) -> Node:
        if edge.number != 1:
            node = self._call(aten.mul.Tensor, node, edge.number)
        return node if edge.tensor is None else self._call(aten.mul.Tensor, node, edge.tensor)

    def _times_finite(self, node: Node, edge: _Edge) -> Node:
        """Return `_times`, and NaN where the tensor is infinite, as in a product with probabilities, most of them 0."""
        found = self._times(node, edge)
        if edge.tensor is None:
            return found
        return self._call(aten.add.Tensor, found, self._call(aten.sub.Tensor, edge.tensor, edge.tensor))

    def _sized(self, node: Node, like: Node) -> Node:
        """Return a view of a node with the leading dimensions of `like`; a copy if that is no view."""
        lead = shape_of(like)[:-2]
        if same_all(lead, shape_of(node)[:-2]):
            return node
        places = [*((like, dim) for dim in range(len(lead))), *((node, len(shape_of(node)) + dim) for dim in (-2, -1))]
        shape = [self._emitter.size(*place, before=self._before, like=self._like) for place in places]
        try:
            node.meta["val"].view([n if isinstance(n, int) else n.meta["val"] for n in shape])
        except (RuntimeError, ValueError):
            node = self._call(aten.clone.default, node, memory_format=torch.contiguous_format)
        return self._call(aten.view.default, node, shape)

    def _wide(self, node: Node) -> Node:
        return node if node.meta["val"].dtype.itemsize >= 4 else self._converted(node, torch.float32)

    def _cast(self, node: Node, like: Node) -> Node:
        return self._converted(node, like.meta["val"].dtype)

    def _converted(self, node: Node, dtype: torch.dtype) -> Node:
        if node.meta["val"].dtype == dtype:
            return node
        return self._call(prims.convert_element_type.default, node, dtype)

    def _product(self, function: Callable[[Tensor, Tensor], Tensor], one: Node, other: Node, like: Node) -> Node:
        """Add a product of tensors with the leading dimensions of `like`, and return its node."""

        def product(one: Tensor, other: Tensor, like: Tensor) -> Tensor:
            lead = like.shape[:-2]
            found = function(*(tensor.reshape(math.prod(lead), *tensor.shape[-2:]) for tensor in (one, other)))
            return found.view(*lead, *found.shape[-2:])

        return self._emitter.inline(product, (one, other, like), before=self._before, like=self._like)

    def _call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        return self._emitter.call(target, args, kwargs, before=self._before, like=self._like)


def _of_value(probabilities: Tensor, gradient: Tensor) -> Tensor:
    return torch.bmm(probabilities.mT, gradient)


def _of_map(gradient: Tensor, value: Tensor) -> Tensor:
    return torch.bmm(gradient, value.mT)


def _swaps(node: object) -> bool:
    """Return whether a node swaps the last two dimensions of its first argument."""
    order = permutation(node) if isinstance(node, Node) and node.op == "call_function" else None
    return order is not None and order == (*range(len(order) - 2), len(order) - 1, len(order) - 2)


def _adds_keys(node: Node) -> bool:
    """Return whether a node is a sum over the last dimension, or over this one and others."""
    if op_name(node) != "aten::sum":
        return False
    (source, *_), dims = node.args, bind(node).get("dim")
    return not dims or -1 in dims or len(shape_of(source)) - 1 in dims  # type: ignore[arg-type]


def _form_of_gradient(node: Node, forms: Mapping[Node, Form]) -> Form | None:
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
