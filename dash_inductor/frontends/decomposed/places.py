"""Where attention reads its operands and puts its results: tensors of any dimensions as [batch, heads, length, dim]."""

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
from ...graph.drafts import Drafts, users
from ...graph.emit import Emitter
from ...graph.nodes import Argument, op_name
from ...graph.numbers import holds_all
from ...model.call import Order
from ..attention import Axes
from ..repeat_kv import find_repeat
from .labels import CAST, Atom, Atoms, Dimension, Labels, broadcast, shape_of, stride_of, strides
from .scores import Stuck, constant_factor
from .value import Kind, Operand, Value
from .values import Values

aten, prims = torch.ops.aten, torch.ops.prims

_COPIED = (0, 2, 1, 3)
"""The order of a result that is copied."""
Call = Callable[..., Node]
"""Adds a node: an operator with its arguments."""


@dataclass(frozen=True)
class Roles:
    """The dimensions of an attention: batch, heads of query, heads of key and value, queries, keys, head dim, and that
    of value.
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
        """Leading dimensions in front of the heads are the batch; a single one is the batch itself.

        The rows of the product of query and key may be queries of grouped heads.  They are told apart where a mask or a
        bias broadcasts along the heads, a sink along the queries, or the output has them in another order; else all
        rows are queries of the head of key.

        Raises:
            Stuck: they lie otherwise.
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
        """The four dimensions of an operand or result, or of the scores."""
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
    """The rows that are queries."""
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
    """A node with the labels `own`, in the dimensions of the labels `wanted`, which are of the same atoms.

    Raises:
        ValueError: they are not.
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
    """Dimensions of single atoms merged; a copy where that is no view."""
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
    """The product of numbers and nodes, of which at least one is a node."""
    nodes = [part for part in parts if isinstance(part, Node)]
    known = math.prod(part for part in parts if not isinstance(part, Node))
    found = functools.reduce(functools.partial(call, operator.mul), nodes)
    return found if known == 1 else call(operator.mul, found, known)


def size_in(ask: Callable[[Node, int], Any], before: Node) -> Callable[[Atom], Any]:
    """The size of an atom, as a number or a node in front of `before`; `ask` gives the one of a placeholder."""

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
    """A sink: a node that has a result of attention, in its own dimensions and dtype.

    Attributes:
        node: the node.
        labels: of the node.
        wanted: the four dimensions of the result.
        atoms: of both.
        own: what of its users belongs to the attention.
        before: the nodes that have the same result in front of this one, for which nothing is put.
        copied: the four dimensions are none of the memory, as where grouped heads stand behind the queries: the result
            is copied there.
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
    """Finds the places of one attention's operands and results; nothing is read of nodes to `avoid`."""

    drafts: Drafts
    values: Values
    roles: Roles
    avoid: set[Node]

    def operand(self, kind: Operand, dtype: torch.dtype | None) -> Node:
        """The node to read: the first of the chain in the four dimensions; else a permutation of them; else any."""
        whole = [node for node in self.values.chains[kind] if node not in self.avoid] or self.values.chains[kind]
        chain = [node for node in whole if dtype is None or node.meta["val"].dtype == dtype]
        found: Node = _best(chain or whole, lambda node: self._fit(kind, self.values.named[kind][node]))
        return found

    def factor(self, kind: Operand, node: Node) -> float:
        """A node's value, in terms of the first of its chain."""
        return self.values.named[kind][node].factor

    def _fit(self, kind: Kind | Operand, value: Value) -> int:
        own, wanted = self.values.atoms.resolved(value.labels), self.values.atoms.resolved(self.roles.of_kind(kind))
        return 0 if own == wanted else 1 if len(own) == 4 and set(own) == set(wanted) else 2

    def view(self, kind: Operand, node: Node, dtype: torch.dtype | None = None) -> Argument:
        """The place of an operand in its four dimensions."""
        found = self.in_four(node, self.values.named[kind][node].labels, self.roles.of_kind(kind))
        if dtype is not None and found.meta["val"].dtype != dtype:
            found = self._draft(prims.convert_element_type.default, found, dtype)
        return self.place(found)

    def in_four(self, node: Node, labels: Labels, wanted: Labels) -> Node:
        """A node in other dimensions."""
        atoms = self.values.atoms
        try:
            size = size_in(lambda tensor, dim: self.drafts.size(tensor, dim, like=node), Emitter.behind(node))
            return converted(self._draft, size, atoms, node, labels, wanted)
        except ValueError as error:
            raise Stuck(node, str(error)) from error

    def place(self, node: Node) -> Argument:
        """A place that has this node, or what takes its place."""
        return Argument(self._draft(aten.alias.default, node), 0)

    def _draft(self, target: Callable[..., Any], source: Node, *args: Any, **kwargs: Any) -> Node:
        return self.drafts.call(target, source, *args, like=source, **kwargs)

    def result(self, kind: Kind, factor: float, dtype: torch.dtype, key: Node | None = None) -> Result:
        """The sink of a result that is `factor` times what the values say: the last node that has it.

        Args:
            key: the operand whose gradient this is, which may repeat a smaller one: the sum of its gradient is then
                behind the four dimensions.

        Raises:
            Stuck: no node has it.
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
        """A result and what is made of it alone, by views, casts and factors."""
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
