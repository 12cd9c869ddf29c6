"""Converts operands and results of decomposed attention, of any dimensions, to [batch, heads, length, dim] and back."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from ...graph import sizes
from ...graph.emit import Emitter
from ...graph.nodes import Argument, op_name
from ...graph.numbers import holds_all
from ...graph.temporaries import Temporaries, users
from ...model.attention_spec import Order
from ..attention import Axes
from ..repeat_kv import find_repeat
from .labels import CAST, Atom, Atoms, Dimension, Labels, broadcast, shape_of, stride_of, strides
from .scores import Stuck, constant_factor
from .value import Kind, Operand, Value
from .values import Values

aten, prims = torch.ops.aten, torch.ops.prims

_COPIED = (0, 2, 1, 3)
"""The layout of a result that is copied: [batch, length, heads, dim] in memory."""
Call = Callable[..., Node]
"""A function that adds a node: it takes an operator and its arguments."""


@dataclass(frozen=True)
class Roles:
    """Which atoms (index ranges) make up each dimension of an attention.

    Attributes:
        atoms: the atoms of the graph, by which labels are resolved.
        batch: the batch dimension.
        heads, kv_heads: the heads of the query, and those of key and value.
        queries, keys: the lengths of the query, and of key and value.
        inner, value: the head dims of query and key, and of value.
    """

    atoms: Atoms
    batch: Dimension
    heads: Dimension
    kv_heads: Dimension
    queries: Dimension
    keys: Dimension
    inner: Dimension
    value: Dimension

    @staticmethod
    def of(values: Values) -> Roles:
        """Determine the roles of an attention's dimensions.

        If several dimensions come before the queries, the last is the heads and the others are the batch; a single one
        is the batch.

        The rows of the product of query and key may combine queries with the heads of a group (GQA).  The two are told
        apart if a mask or a bias broadcasts along the heads, a sink broadcasts along the queries, or the output has
        them in another order; otherwise all rows are queries of the kv head.

        Raises:
            Stuck: a step between the product and the softmax permutes the leading dimensions.
        """
        scores, atoms = values.scores, values.atoms
        product = scores.product
        assert product is not None
        rows, keys = map(atoms.atoms, (values.query_dim, scores.key_dim))
        lead = sum(atoms.resolved(scores.labels[product])[:-2], ())
        queries = _queries(values, rows)
        group = tuple(atom for atom in rows if atom not in queries)
        kv_heads: Dimension = ()
        for node, labels in scores.labels.items():
            own = atoms.resolved(labels)
            of_rows = [dim for dim, dimension in enumerate(own) if dimension and set(dimension) <= set(rows)]
            in_front = [dimension for dim, dimension in enumerate(own[:-1]) if dim not in of_rows]
            parted = len(of_rows) > 1 if group else len(own) >= 4 and own[-2] == rows
            if parted and len(in_front) > 1 and own[-1] in (keys, atoms.atoms(scores.wide_dim)):
                kv_heads = in_front[-1]
                if sum(in_front, ()) != lead:
                    raise Stuck(node, "the leading dimensions are permuted")
                break
        batch = lead[: len(lead) - len(kv_heads)]
        inner, value = map(atoms.atoms, (values.inner_dim, values.value_dim))
        return Roles(atoms, batch, (*kv_heads, *group), kv_heads, queries, keys, inner, value)

    def of_kind(self, kind: Kind | Operand) -> Labels:
        """Return the labels of a tensor's four dimensions, [batch, heads, length, dim].

        Args:
            kind: an operand or a result of attention; any other kind stands for the scores, [batch, heads, queries,
                keys].
        """
        if kind in ("Q", "dQ"):
            return self.batch, self.heads, self.queries, self.inner
        if kind in ("K", "dK"):
            return self.batch, self.kv_heads, self.keys, self.inner
        if kind in ("V", "dV"):
            return self.batch, self.kv_heads, self.keys, self.value
        if kind in ("O", "G"):
            return self.batch, self.heads, self.queries, self.value
        return self.batch, self.heads, self.queries, self.keys


def _queries(values: Values, rows: Dimension) -> Dimension:
    """Return those atoms of the product's rows that are queries, without the heads of a group."""
    scores, atoms = values.scores, values.atoms
    for term in scores.terms:
        present = {atom for dimension in term.own(atoms) for atom in dimension} & set(rows)
        if 0 < len(present) < len(rows):
            return tuple(atom for atom in rows if atom in present)
    if scores.sink is not None:
        (labels,) = [own for node, own in scores.labels.items() if op_name(node) == "aten::cat"]
        present = {atom for dimension in broadcast(scores.sink, atoms.resolved(labels)) for atom in dimension}
        if 0 < len(present & set(rows)) < len(rows):
            return tuple(atom for atom in rows if atom not in present)
    if rows in atoms.resolved(values.known[values.results["O"]].labels):
        return rows
    for (
        labels
    ) in scores.labels.values():  # the output has its rows in another order, so that all of them are no dimension
        parts = [dimension for dimension in atoms.resolved(labels) if dimension and set(dimension) <= set(rows)]
        if len(parts) > 1:
            return parts[-1]
    return rows


def converted(call: Call, size: Callable[[Atom], Any], atoms: Atoms, node: Node, own: Labels, wanted: Labels) -> Node:
    """Convert a node to the dimensions of `wanted` by squeeze, view, permute and unsqueeze.

    A label lists, for every dimension of a tensor, the atoms (see `Atom`: elementary index ranges, such as
    the heads) that it merges.  `own` and `wanted` must consist of the same atoms.

    Args:
        call: adds a node.
        size: returns the size of an atom, as a number or a node.
        atoms: the atoms of the labels.
        node, own: the node, and its labels.
        wanted: the labels of the result.

    Raises:
        ValueError: the atoms differ.
    """
    own, wanted = atoms.resolved(own), atoms.resolved(wanted)
    if own == wanted:
        return node
    before, after = [d for d in own if d], [d for d in wanted if d]
    if {atom for d in before for atom in d} != {atom for d in after for atom in d}:
        raise ValueError("other atoms")
    units = [dim for dim, dimension in enumerate(own) if not dimension]
    if units:
        node = call(aten.squeeze.dims, node, units)
    if set(before) != set(after):
        before, parts = [(atom,) for d in before for atom in d], before
        if before != parts:
            node = call(aten.view.default, node, [size(atom) for (atom,) in before])
    flat = after if set(before) == set(after) else [(atom,) for d in after for atom in d]
    order = [before.index(d) for d in flat]
    if order != list(range(len(order))):
        node = call(aten.permute.default, node, order)
    if flat != after:
        node = merged(call, node, flat, after, size)
    for dim, dimension in enumerate(wanted):
        if not dimension:
            node = call(aten.unsqueeze.default, node, dim)
    return node


def merged(
    call: Call, node: Node, flat: Sequence[Dimension], after: Sequence[Dimension], size: Callable[[Atom], Any]
) -> Node:
    """Reshape a node, each of whose dimensions is one atom (`flat`), so that they are merged as in `after`.

    The tensor is copied first if that is not a view.

    Args:
        call: adds a node.
        node: the node.
        flat: its dimensions.
        after: the wanted dimensions, of the same atoms in the same order.
        size: returns the size of an atom, as a number or a node.
    """
    shape: list[Any] = []
    dim, whole = 0, shape_of(node)
    for dimension in after:
        sized: sizes.Dim = 1
        for n in whole[dim : dim + len(dimension)]:
            sized = sized * n
        dim += len(dimension)
        known = sizes.static(sized)
        if known is not None:
            shape.append(known)
        elif len(dimension) > 1 and -1 not in shape:
            shape.append(-1)
        else:
            shape.append(_product(call, list(map(size, dimension))))
    try:
        node.meta["val"].view([n if isinstance(n, int) else n.meta["val"] for n in shape])
    except (RuntimeError, ValueError):
        node = call(aten.clone.default, node, memory_format=torch.contiguous_format)
    return call(aten.view.default, node, shape)


def _product(call: Call, parts: Sequence[Any]) -> Any:
    """Return the product of numbers and nodes, at least one of which is a node."""
    nodes = [part for part in parts if isinstance(part, Node)]
    known = math.prod(part for part in parts if not isinstance(part, Node))
    found = functools.reduce(functools.partial(call, operator.mul), nodes)
    return found if known == 1 else call(operator.mul, found, known)


def size_in(ask: Callable[[Node, int], Any], before: Node) -> Callable[[Atom], Any]:
    """Return a function from an atom (index range) to its size: a number, or a node that comes before `before`.

    The function raises ValueError if the size is not known there.

    Args:
        ask: returns the size of a placeholder's dimension.
        before: the node before which the size must be known.
    """

    def size(atom: Atom) -> Any:
        known = sizes.static(atom.size)
        if known is not None:
            return known
        for node, dim in atom.places:
            if node.graph is before.graph and node < before and node.op == "placeholder":
                return ask(node, dim)
        for node in before.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and value.node.expr == atom.size.node.expr and node < before:  # type: ignore[union-attr]
                return node
        raise ValueError("a size is not known")

    return size


@dataclass(frozen=True)
class Result:
    """A node that holds a result of attention, in its own dimensions and dtype; implements `Sink`.

    Attributes:
        node: the node.
        labels: for each dimension of the node, the atoms (index ranges) that it merges.
        wanted: the labels of the result as [batch, heads, length, dim].
        atoms: the atoms of `labels` and of `wanted`.
        own: the users of the node that belong to the attention.
        before: earlier nodes that hold the same result and are erased without a replacement.
        copied: whether the result is copied into the node's layout, because its four dimensions have no strides there,
            for example where the heads of a group lie after the queries.
    """

    node: Node
    labels: Labels
    wanted: Labels
    atoms: Atoms
    own: frozenset[Node] = field(default=frozenset(), repr=False)
    before: frozenset[Node] = field(default=frozenset(), repr=False)
    copied: bool = False

    @property
    def axes(self) -> Axes | None:
        return "bhsd" if self.atoms.resolved(self.labels) == self.atoms.resolved(self.wanted) else None

    @property
    def used(self) -> Node | None:
        return self.node if self.users else None

    @property
    def users(self) -> list[Node]:
        return [user for user in users(self.node) if user not in self.own]

    @property
    def order(self) -> Order | None:
        if self.copied:
            return _COPIED
        value = self.node.meta["val"]
        of_atoms = strides(self.atoms, self.labels, value)
        wanted = self.atoms.resolved(self.wanted)
        found = [stride_of(dimension, of_atoms) for dimension in wanted]
        shape: list[sizes.Dim] = []
        for dimension in wanted:
            whole: sizes.Dim = 1
            for atom in dimension:
                whole = whole * atom.size
            shape.append(whole)
        if any(stride is None for stride in found):
            return None
        return sizes.dense_order(shape, [stride for stride in found if stride is not None])

    def put(self, emitter: Emitter, result: Node, before: Node) -> tuple[Node, Node]:
        node = self.node

        def call(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
            return emitter.call(target, args, kwargs, before=before, like=node)

        dtype = node.meta["val"].dtype
        if result.meta["val"].dtype != dtype:
            result = call(prims.convert_element_type.default, result, dtype)
        size = size_in(lambda tensor, dim: emitter.size(tensor, dim, before=before, like=node), before)
        return node, converted(call, size, self.atoms, result, self.wanted, self.labels)


@dataclass(frozen=True)
class Reader:
    """Finds the nodes that hold one attention's operands and results.

    Attributes:
        temporaries: adds temporary nodes.
        values: what is known of the attention's nodes.
        roles: the roles of its dimensions.
        avoid: nodes that will be erased; they are read only if nothing else holds an operand.
    """

    temporaries: Temporaries
    values: Values
    roles: Roles
    avoid: set[Node]

    def operand(self, kind: Operand, dtype: torch.dtype | None) -> Node:
        """Return the node from which to read query, key, value or the gradient of the output.

        Of the nodes from which the operand is computed, this is the first that is [batch, heads, length, dim], else the
        first that is a permutation of it, else the first of all.  Nodes of another dtype than `dtype` are left out if
        there are others.
        """
        whole = [node for node in self.values.chains[kind] if node not in self.avoid] or self.values.chains[kind]
        chain = [node for node in whole if dtype is None or node.meta["val"].dtype == dtype]
        found: Node = _best(chain or whole, lambda node: self._fit(kind, self.values.named[kind][node]))
        return found

    def factor(self, kind: Operand, node: Node) -> float:
        """Return the constant factor between `node` and the first node of an operand's chain (`Known.chains`)."""
        return self.values.named[kind][node].factor

    def _fit(self, kind: Kind | Operand, value: Value) -> int:
        own, wanted = self.values.atoms.resolved(value.labels), self.values.atoms.resolved(self.roles.of_kind(kind))
        return 0 if own == wanted else 1 if len(own) == 4 and set(own) == set(wanted) else 2

    def view(self, kind: Operand, node: Node, dtype: torch.dtype | None = None) -> Argument:
        """Return an `Argument` through which a replacement reads an operand as [batch, heads, length, dim].

        Args:
            kind: the operand.
            node: the node from which it is read, see `operand`.
            dtype: the dtype to which it is cast; None for no cast.
        """
        found = self.in_four(node, self.values.named[kind][node].labels, self.roles.of_kind(kind))
        if dtype is not None and found.meta["val"].dtype != dtype:
            found = self._temporary(prims.convert_element_type.default, found, dtype)
        return self.place(found)

    def in_four(self, node: Node, labels: Labels, wanted: Labels) -> Node:
        """Return a node converted from the dimensions of `labels` to those of `wanted`, by temporary nodes.

        Raises:
            Stuck: the labels have other atoms, or a size is unknown.
        """
        atoms = self.values.atoms
        try:
            size = size_in(lambda tensor, dim: self.temporaries.size(tensor, dim, like=node), Emitter.behind(node))
            return converted(self._temporary, size, atoms, node, labels, wanted)
        except ValueError as error:
            raise Stuck(node, str(error)) from error

    def place(self, node: Node) -> Argument:
        """Return an `Argument` that refers to this node, and keeps referring to its replacement if it is replaced."""
        return Argument(self._temporary(aten.alias.default, node), 0)

    def _temporary(self, target: Callable[..., Any], source: Node, *args: Any, **kwargs: Any) -> Node:
        return self.temporaries.call(target, source, *args, like=source, **kwargs)

    def result(self, kind: Kind, factor: float, dtype: torch.dtype, key: Node | None = None) -> Result:
        """Return the sink of a result, at the last node that holds `factor` times what the result's product computes.

        Args:
            kind: the result, such as "O" or "dQ".
            factor: the wanted factor.
            dtype: the preferred dtype of the node.
            key: the operand whose gradient this is.  If it repeats a smaller tensor (GQA), the sum of its gradient
                follows the node with the four dimensions.

        Raises:
            Stuck: no node holds the result with this factor.
        """
        node = self.values.results[kind]
        found = [(node, value) for node, value in self._after(node) if abs(value.factor - factor) <= 1e-5 * abs(factor)]
        if not found:
            raise Stuck(node, f"{kind} has another factor")
        typed = [pair for pair in found if pair[0].meta["val"].dtype == dtype] or found
        typed.reverse()
        exactly = key is not None and find_repeat(key) is not None
        chosen, value = _best(typed, lambda pair: _rank(self._fit(kind, pair[1]), exactly))
        chain = [other for other, _ in self._after(node)]
        before = frozenset(chain[: chain.index(chosen)])
        wanted, atoms = self.roles.of_kind(kind), self.values.atoms
        placed = Result(chosen, value.labels, wanted, atoms, before=before)
        first, of_first = found[0]
        if placed.order is None and first is node and first.meta["val"].is_contiguous():
            return Result(first, of_first.labels, wanted, atoms, copied=True)
        return placed

    def _after(self, node: Node) -> Iterator[tuple[Node, Value]]:
        """Yield a result, and then the nodes computed from it alone by views, casts and factors, with their values."""
        value, own = self.values.known[node], self.values.dtype
        while True:
            yield node, value
            readers = users(node)
            if len(readers) != 1:
                return
            (user,) = readers
            if op_name(user) == CAST and (own is None or not holds_all(user.meta["val"].dtype, own)):
                return
            labels = self.values.atoms.through(user, value.labels) if user.op == "call_function" else None
            factor = constant_factor(user) if user.op == "call_function" else None
            if labels is not None:
                value = Value(value.kind, labels, value.factor)
            elif factor is not None and factor[0] is node:
                value = Value(value.kind, value.labels, value.factor * factor[1])
            else:
                return
            node = user


def _rank(fit: int, exactly: bool) -> int:
    return fit if exactly else max(fit, 1)


def _best(found: Sequence[Any], key: Callable[[Any], int]) -> Any:
    return min(found, key=key)
