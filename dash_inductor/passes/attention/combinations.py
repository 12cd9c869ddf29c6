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
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ...frontends.decomposed.labels import permutation, shape_of
from ...frontends.decomposed.scores import PRODUCTS
from ...graph.backward import of_backward
from ...graph.emit import Emitter, erase_dead
from ...graph.nodes import bind, op_name
from ...graph.numbers import holds_all
from ...graph.sizes import same_all
from .combined_maps import Combination, Edge, Form, form_of_gradient, same_form, softmax_of, uncast

aten, prims = torch.ops.aten, torch.ops.prims

SPLIT = "(P1 - c * P2) @ V as P1 @ V - c * (P2 @ V)"
"""Describes a product that was split."""
_WHOLE = "dash_inductor_whole"


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
    found = (Combination.of(node, places) for node in products if _WHOLE not in node.meta)
    return [_Splitting(each, Emitter(graph), backward).run() for each in found if each is not None]


def keep_whole(graph: Graph, splits: Collection[Split]) -> None:
    """Mark products that `split` shall not split again, in a graph in which they are whole."""
    names = {each.name for each in splits}
    for node in graph.nodes:
        if node.name in names:
            node.meta[_WHOLE] = True


class _Splitting:
    """Splits one product, and the products of its gradient.

    Sums and factors are computed in float32 at least, and rounded where a product reads them.
    """

    def __init__(self, own: Combination, emitter: Emitter, backward: Set[Node]) -> None:
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
        softmaxes = tuple(filter(None, map(softmax_of, own.maps)))
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
            form = form_of_gradient(node, forms)
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
                    fits = op_name(user) == "aten::mul" and len(other) == 1 and uncast(other[0]) is uncast(edge.source)
                    fits = fits and same_form(form, self._own.forms[step])
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
                alike = [own for own in rows if same_form(form, self._own.forms[own])]
                read = set(filter(None, (softmax_of(arg) for arg in user.args if arg is not node)))
                if read:  # sums, and other products with the same value, have maps whose gradients are one node
                    alike = [own for own in alike if softmax_of(own) in read]
                if len(alike) != 1 or not same_all(shape_of(alike[0]), shape_of(node)):
                    continue
                (own,) = alike
                if own not in products:
                    products[own] = self._product(_of_map, rows[own], wide[own], own)
                user.replace_input_with(node, self._cast(products[own], node))

    def _times(self, node: Node, edge: Edge) -> Node:
        if edge.number != 1:
            node = self._call(aten.mul.Tensor, node, edge.number)
        return node if edge.tensor is None else self._call(aten.mul.Tensor, node, edge.tensor)

    def _times_finite(self, node: Node, edge: Edge) -> Node:
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
