"""What the nodes around a softmax are, in terms of attention: the forward, and the derivative as autograd computes it.

A `Value` is a tensor times a constant.  Beginning at what is known, the users of known nodes are named by rules, until
no rule applies.  Rounding to another dtype is no difference.  With scores S, probabilities P = softmax(S), the dropped
ones D, output O = D V, and G the gradient of O:

    dD = G V^T, dP = dD * keep / (1 - p), dS = P * (dP - rowsum(P * dP)), dV = D^T G, dQ = dS K, dK = dS^T Q

The rows of dS have the sum 0, so that whatever is subtracted from all scores of a row has no gradient.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Iterator, Set
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch.fx import Node

from ...graph.drafts import users
from ...graph.nodes import bind, op_name
from ...graph.sizes import Dim, same, static
from .labels import CAST, COPIES, VIEWS, Atom, Atoms, Dimension, Labels, is_float, shape_of
from .scores import PRODUCTS, NotAttention, Scores, constant_factor, number_of

Kind = Literal[
    "score", "row", "maximum", "index", "flag", "hidden", "visible", "row visible", "empty", "tanh", "tanh squared",
    "slope", "exponential", "sum", "random", "keep",
    "P", "D", "dD", "dP", "P dP", "rowsum", "P rowsum", "dP - rowsum", "dS", "capped dS", "dsink", "zero",
    "O", "dQ", "dK", "dV",
]  # fmt: skip

Operand = Literal["Q", "K", "V", "G"]
RESULTS: tuple[Kind, ...] = ("O", "dQ", "dK", "dV")
PUBLIC = (*RESULTS, "dsink")
"""What the rest of the program may read, too."""

_WITH_FACTOR = (
    "keep", "P", "D", "dD", "dP", "P dP", "rowsum", "P rowsum", "dP - rowsum", "dS", "capped dS", "zero",
)  # fmt: skip
_EMPTY: dict[tuple[str, str], Kind] = {
    ("hidden", "aten::logical_not"): "visible",
    ("visible", "aten::any"): "row visible",
    ("row visible", "aten::logical_not"): "empty",
    ("hidden", "aten::all"): "empty",
}
"""How a program finds the rows whose scores all are minus infinity; their probabilities are no numbers, or zeros."""

_RANDOM = ("aten::rand", "prims::inductor_random")


@dataclass(frozen=True)
class Value:
    """A tensor of attention times `factor`, with the labels of its dimensions."""

    kind: Kind | Operand
    labels: Labels = ()
    factor: float = 1.0


@dataclass
class Values:
    """The values of nodes, by rules.

    Args:
        scores: what was found of the scores.
        place: the places of all nodes in the graph.
        of_backward: the nodes that depend on gradients.

    Attributes:
        known: the values of nodes that are attention's own.
        named: query, key, value and the gradient of the output: the nodes that have them, each by its kind; one node
            may be several.
        chains: the nodes from which the products' operands are made, the operand of the product last.
        query_dim, inner_dim, value_dim: the dimensions of the queries, of query and key, and of value.
        results: the products of the output and of the gradients.
        dropout: the probability with which a probability is dropped.
        random: the nodes that draw random numbers.
    """

    scores: Scores
    place: dict[Node, int]
    of_backward: Set[Node]
    known: dict[Node, Value] = field(default_factory=dict)
    named: dict[Operand, dict[Node, Value]] = field(default_factory=dict)
    chains: dict[Operand, list[Node]] = field(default_factory=dict)
    query_dim: Dimension = ()
    inner_dim: Dimension = ()
    value_dim: Dimension = ()
    results: dict[Kind, Node] = field(default_factory=dict)
    dropout: float = 0.0
    random: list[Node] = field(default_factory=list)
    _queue: list[tuple[int, Node]] = field(default_factory=list)

    @property
    def atoms(self) -> Atoms:
        return self.scores.atoms

    def run(self, exponential: Node, total: Node, quotient: Node) -> None:
        """Name all that follows from a softmax.

        Raises:
            Stuck: the products are not those of attention.
        """
        labels = self.scores.labels
        for node, own in labels.items():
            self._set(node, Value("score", own))
        if self.scores.tanh is not None:
            self._set(self.scores.tanh, Value("tanh", labels[self.scores.tanh]))
        of_exponent = labels[next(iter(labels))]
        self._set(exponential, Value("exponential", of_exponent))
        self._set(total, Value("sum"))
        self._set(quotient, Value("P", of_exponent))
        self._product_of_scores()
        self._work()
        if "G" not in self.named and "O" in self.results:
            self._look_for_gradient()
            self._work()

    def strangers(self) -> Iterator[tuple[Node, Node]]:
        """The readers without a value of nodes that are attention's own, with these nodes."""
        for node, value in self.known.items():
            if value.kind not in PUBLIC:
                yield from ((node, user) for user in users(node) if user not in self.known)

    # ---- the work list ----

    def _set(self, node: Node, value: Value) -> None:
        self.known[node] = value
        if value.kind not in RESULTS:
            for user in node.users:
                self._push(user)

    def _push(self, node: Node) -> None:
        if node in self.place:
            heapq.heappush(self._queue, (self.place[node], node))

    def _work(self) -> None:
        while self._queue:
            _, node = heapq.heappop(self._queue)
            if node.op != "call_function":
                continue
            for kind in self.named:
                self._name(kind, node)
            if node not in self.known:
                value = self._value(node)
                if value is not None:
                    self._set(node, value)

    # ---- operands ----

    def _name(self, kind: Operand, node: Node) -> None:
        """Whether a node has an operand, by a view, a cast or a constant factor of another one that has it."""
        named = self.named[kind]
        if node in named:
            return
        first = named.get(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
        labels = None if first is None else self.atoms.through(node, first.labels)
        factor = constant_factor(node)
        if first is not None and labels is not None:
            self._set_operand(node, replace(first, labels=labels))
        elif factor is not None and factor[0] in named:
            value = named[factor[0]]
            self._set_operand(node, replace(value, factor=value.factor * factor[1]))

    def _set_operand(self, node: Node, value: Value) -> None:
        self.named.setdefault(value.kind, {})[node] = value  # type: ignore[arg-type]
        for user in node.users:
            self._push(user)

    def _product_of_scores(self) -> None:
        product = self.scores.product
        assert product is not None
        labels = self.atoms.resolved(self.scores.labels[product])
        key_dim = self._keys
        lead, rows, columns = labels[:-2], labels[-2], labels[-1]
        one, other = product.args[-2:]
        self.inner_dim = _new_dimension(one, -1)
        left, right = (*lead, rows, self.inner_dim), (*lead, self.inner_dim, columns)
        if columns == key_dim:
            self.query_dim = rows
            self._operand("Q", one, left)
            self._operand("K", other, right)
        elif rows == key_dim:
            self.query_dim = columns
            self._operand("K", one, left)
            self._operand("Q", other, right)
        else:
            raise NotAttention

    def _operand(self, kind: Operand, node: object, labels: Labels) -> None:
        """An operand of a product, and everything that it is made of by views, casts to more bits, and factors."""
        assert isinstance(node, Node)
        factor, chain = 1.0, []
        while True:
            chain.append((node, labels, factor))
            found = self._before(kind, node, labels)
            if found is None:
                break
            node, labels, times = found
            factor *= times
        self.chains[kind] = [part for part, _, _ in reversed(chain)]
        for part, own, after in reversed(chain):  # a factor behind a node is none of its own
            self._set_operand(part, Value(kind, own, factor / after))

    def _before(self, kind: Operand, node: Node, labels: Labels) -> tuple[Node, Labels, float] | None:
        source = node.args[0] if node.op == "call_function" and node.args else None
        if op_name(node) == CAST and is_float(source) and not _widens(source, node):
            return None
        back = self.atoms.back(node, labels) if node.op == "call_function" else None
        if back is not None and is_float(source):
            return source, back, 1.0  # type: ignore[return-value]
        factor = constant_factor(node) if kind in ("Q", "K") else None
        return None if factor is None or not factor[1] else (factor[0], labels, factor[1])

    def _look_for_gradient(self) -> None:
        """The gradient of the output where no gradient of value is computed: a product with value tells it."""
        for node in list(self.known):
            for user in users(node):
                if user in self.known or user not in self.of_backward or op_name(user) != "aten::mul":
                    continue
                for arg in user.args:
                    if self.known[node].kind == "P" and isinstance(arg, Node) and arg not in self.known:
                        self._gradient_behind(arg)

    def _gradient_behind(self, node: Node) -> None:
        while op_name(node) not in PRODUCTS:
            factor = constant_factor(node)
            if factor is not None:
                node = factor[0]
            elif op_name(node) == "aten::mul" and any(self._is(arg, "keep") for arg in node.args):
                (node,) = [arg for arg in node.args if isinstance(arg, Node) and not self._is(arg, "keep")]
            elif op_name(node) == "aten::slice_scatter" and isinstance(node.args[1], Node):
                node = node.args[1]
            elif op_name(node) in (*VIEWS, *COPIES, CAST, "aten::permute", "aten::expand", "aten::constant_pad_nd"):
                assert isinstance(node.args[0], Node)
                node = node.args[0]
            else:
                return
        self._take_gradient(node)

    # ---- rules ----

    def _is(self, node: object, *kinds: Kind) -> bool:
        return isinstance(node, Node) and node in self.known and self.known[node].kind in kinds

    def _of(self, node: Node) -> list[Value | None]:
        return [self.known.get(arg) if isinstance(arg, Node) else None for arg in node.args]

    def _value(self, node: Node) -> Value | None:
        name = op_name(node)
        if node.target is operator.getitem:
            return self._result_of_maximum(node)
        if name in PRODUCTS:
            return self._product(node)
        first = self.known.get(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
        if first is not None:
            if first.kind == "zero" and name in (*VIEWS, *COPIES, CAST, "aten::expand", "aten::permute"):
                return first
            if first.kind == "keep" and name == CAST:
                return first
            labels = self.atoms.through(node, first.labels)
            if labels is not None:
                return replace(first, labels=labels)
            if name == "aten::expand" and first.kind in ("row", "rowsum", "flag"):
                return first
        factor = constant_factor(node)
        if factor is not None and factor[0] in self.known:
            value = self.known[factor[0]]
            return replace(value, factor=value.factor * factor[1]) if value.kind in _WITH_FACTOR else None
        rule = _RULES.get(name)
        return None if rule is None else rule(self, node)

    def _result_of_maximum(self, node: Node) -> Value | None:
        if not self._is(node.args[0], "maximum"):
            return None
        return Value("row" if node.args[1] == 0 else "index")

    def _maximum(self, node: Node) -> Value | None:
        return Value("row") if self._is(node.args[0], "score") else None

    def _maximum_and_place(self, node: Node) -> Value | None:
        return Value("maximum") if self._is(node.args[0], "score") else None

    def _flag(self, node: Node) -> Value | None:
        known = [self._is(arg, "score", "row", "flag") or number_of(arg) is not None for arg in node.args[:2]]
        name, first = op_name(node), self._of(node)[0]
        if name == "aten::eq" and self._is(node.args[0], "score") and number_of(node.args[1]) == -math.inf:
            return Value("hidden")
        if first is not None and (first.kind, name) in _EMPTY:
            return Value(_EMPTY[first.kind, name])
        tests = name in ("aten::eq", "aten::ne")
        return Value("flag") if all(known if tests else known[:1]) else None

    def _mul(self, node: Node) -> Value | None:
        for one, other in (node.args, node.args[::-1]):
            a, b = (self.known.get(arg) if isinstance(arg, Node) else None for arg in (one, other))
            if a is None:
                continue
            if a.kind == "zero":
                return a
            if b is None:
                if a.kind == "P" and isinstance(other, Node) and node not in self.of_backward:
                    return self._drop(a, other)
                continue
            found = self._times(a, b)
            if found is not None:
                return found
        return None

    def _div(self, node: Node) -> Value | None:
        first = self._of(node)[0]
        return first if first is not None and first.kind in ("zero", "flag") else None

    def _times(self, a: Value, b: Value) -> Value | None:
        factor, alike = a.factor * b.factor, self.atoms.same(a.labels, b.labels)
        pair = a.kind, b.kind
        if pair == ("flag", "flag"):
            return a
        if pair == ("tanh", "tanh"):
            return Value("tanh squared", a.labels)
        if pair == ("dD", "keep") and alike:
            return Value("dP", a.labels, factor * (1 - self.dropout))
        if pair == ("dP", "P") and alike:
            return Value("P dP", a.labels, factor)
        if pair == ("P", "rowsum"):
            return Value("P rowsum", a.labels, factor)
        if pair == ("dP - rowsum", "P") and alike:
            return Value("dS", a.labels, factor)
        if pair == ("dS", "slope") and alike:
            return Value("capped dS", a.labels, factor)
        return None

    def _drop(self, probabilities: Value, other: Node) -> Value | None:
        """Dropout: probabilities times random flags, which are times a constant."""
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
        if (
            self.random
            or not whole
            or not 0 < p < 1
            or not all(map(same, shape_of(drawn), _sizes(probabilities.labels)))
        ):
            return None
        self.dropout, self.random = float(p), [drawn, *drawn.all_input_nodes]
        for node in (drawn, *draws):
            self._set(node, Value("random"))
        for node, after in chain:
            self._set(node, Value("keep", probabilities.labels, factor / after))
        return Value("D", probabilities.labels, probabilities.factor * factor)

    def _sub(self, node: Node) -> Value | None:
        one, other = self._of(node)[:2]
        if node.kwargs:
            return None
        if number_of(node.args[0]) == 1 and other is not None and other.kind == "tanh squared":
            return Value("slope", other.labels)
        if one is None or other is None or not _close(one.factor, other.factor):
            return None
        if (one.kind, other.kind) == ("P dP", "P rowsum") and self.atoms.same(one.labels, other.labels):
            return replace(one, kind="dS")
        if (one.kind, other.kind) == ("dP", "rowsum"):
            return replace(one, kind="dP - rowsum")
        return None

    def _rsub(self, node: Node) -> Value | None:
        one = self._of(node)[0]
        squared = one is not None and one.kind == "tanh squared" and number_of(node.args[1]) == 1 and not node.kwargs
        return Value("slope", one.labels) if squared and one is not None else None

    def _add(self, node: Node) -> Value | None:
        if node.kwargs:
            return None
        for one, other in (self._of(node)[:2], self._of(node)[1::-1]):
            if one is None or other is None:
                continue
            if other.kind == "zero" and one.kind in ("dS", "zero"):
                return one
            if (one.kind, other.kind) == ("P dP", "P rowsum") and _close(one.factor, -other.factor):
                return replace(one, kind="dS") if self.atoms.same(one.labels, other.labels) else None
        return None

    def _fma(self, node: Node) -> Value | None:
        a, b, c = self._of(node)
        if a is None or b is None or c is None or (a.kind, b.kind, c.kind) != ("P", "rowsum", "P dP"):
            return None
        fits = self.atoms.same(a.labels, c.labels) and _close(a.factor * b.factor, -c.factor)
        return replace(c, kind="dS") if fits else None

    def _sum(self, node: Node) -> Value | None:
        value, args = self._of(node)[0], bind(node)
        if value is None or not args.get("dim"):
            return None
        if value.kind == "flag":
            return value
        if value.kind not in ("P dP", "dS") or len(args["dim"]) != 1 or not args["keepdim"]:
            return None
        labels = self.atoms.resolved(value.labels)
        if labels[args["dim"][0]] != self.atoms.atoms(self.scores.wide_dim):
            return None
        return Value("rowsum", (), value.factor) if value.kind == "P dP" else Value("zero")

    def _where(self, node: Node) -> Value | None:
        condition, *_ = node.args
        for place, zero in ((2, 1), (1, 2)):
            kept = node.args[place]
            value = self.known.get(kept) if isinstance(kept, Node) else None
            if value is None or number_of(node.args[zero]) != 0:
                continue
            if value.kind == "zero":
                return value
            if value.kind == "P" and self._is(condition, "hidden", "empty") and place == 2:
                return value
            if value.kind in ("dS", "capped dS") and any(
                term.kind == "hide" and term.tensor is condition and term.hidden_if == (place == 2)
                for term in self.scores.terms
            ):
                return value
        return None

    def _scatter(self, node: Node) -> Value | None:
        return Value("zero") if number_of(node.args[0]) == 0 and self._is(node.args[3], "zero") else None

    def _slice(self, node: Node) -> Value | None:
        args, value = bind(node), self._of(node)[0]
        if value is None or value.kind not in ("P", "dS") or self.scores.sink is None or args["step"] != 1:
            return None
        labels, dim = self.atoms.resolved(value.labels), args["dim"] % len(value.labels)
        if labels[dim] != self.atoms.atoms(self.scores.wide_dim):
            return None
        size, whole = shape_of(node)[dim], shape_of(args["self"])[dim]
        if args["start"] in (None, 0) and same(size, whole - 1):
            return replace(value, labels=(*labels[:dim], self.scores.key_dim, *labels[dim + 1 :]))
        behind = static(size) == 1 and (args["start"] == -1 or _is_size(args["start"], whole - 1))
        if value.kind == "dS" and behind:
            return Value("dsink", (*labels[:dim], (), *labels[dim + 1 :]), value.factor)
        return None

    def _beside_zero(self, node: Node) -> Value | None:
        """A gradient of probabilities with a column of zeros for the sink."""
        args, name = bind(node), op_name(node)
        if name == "aten::slice_scatter":
            inner, fits = args["src"], number_of(args["self"]) == 0 and args["start"] in (None, 0)
            fits = fits and args["step"] == 1
            dim = args["dim"]
        else:
            inner, fits = args["self"], list(args["pad"]) == [0, 1] and number_of(args["value"]) in (0, None)
            dim = -1
        value = self.known.get(inner)
        if not fits or value is None or value.kind not in ("dD", "dP") or self.scores.sink is None:
            return None
        labels = self.atoms.resolved(value.labels)
        dim %= len(labels)
        wide = same(shape_of(node)[dim] - 1, shape_of(inner)[dim])
        if not wide or labels[dim] != self.atoms.atoms(self.scores.key_dim):
            return None
        return replace(value, labels=(*labels[:dim], self.scores.wide_dim, *labels[dim + 1 :]))

    # ---- products ----

    @property
    def _keys(self) -> Dimension:
        return self.atoms.atoms(self.scores.key_dim)

    @property
    def _rows(self) -> Dimension:
        return self.atoms.atoms(self.query_dim)

    def _has(self, kind: Operand, node: Node, labels: Labels) -> Value | None:
        """The value of an operand, if a node has it with these labels."""
        value = self.named.get(kind, {}).get(node)
        return value if value is not None and self.atoms.same(value.labels, labels) else None

    def _product(self, node: Node) -> Value | None:
        left, right = node.args
        assert isinstance(left, Node)
        assert isinstance(right, Node)
        for own, other, is_left in ((left, right, True), (right, left, False)):
            value = self.known.get(own)
            if value is not None and len(value.labels) == len(shape_of(node)):
                found = self._product_with(node, value, other, is_left)
                if found is not None:
                    return found
        return self._of_gradient(node, left, right)

    def _product_with(self, node: Node, value: Value, other: Node, is_left: bool) -> Value | None:
        """The product of a plane of probabilities or scores, or of its gradient, with an operand."""
        labels = self.atoms.resolved(value.labels)
        lead, (outer, inner) = labels[:-2], labels[-2:] if is_left else labels[:-3:-1]

        def of(end: Dimension) -> Labels:
            """The labels of the other operand."""
            return (*lead, inner, end) if is_left else (*lead, end, inner)

        def result(kind: Kind, end: Dimension, factor: float) -> Value | None:
            if kind in self.results:
                return None
            self.results[kind] = node
            return Value(kind, (*lead, outer, end) if is_left else (*lead, end, outer), factor)

        keys, rows = self._keys, self._rows
        if value.kind == ("D" if self.random else "P"):
            if node not in self.of_backward and inner == keys:
                if outer != rows:
                    raise NotAttention
                if "O" in self.results:
                    return None
                self.value_dim = _new_dimension(other, -1 if is_left else -2)
                self._operand("V", other, of(self.value_dim))
                return result("O", self.value_dim, value.factor)
            if node in self.of_backward and (inner, outer) == (rows, keys) and "V" in self.named:
                if "G" not in self.named:
                    self._operand("G", other, of(self.value_dim))
                gradient = self._has("G", other, of(self.value_dim))
                return None if gradient is None else result("dV", self.value_dim, value.factor * gradient.factor)
        if value.kind == ("dS" if self.scores.tanh is None else "capped dS"):
            for kind, operand, ends in (("dQ", "K", (keys, rows)), ("dK", "Q", (rows, keys))):
                found = self._has(operand, other, of(self.inner_dim))  # type: ignore[arg-type]
                if (inner, outer) == ends and found is not None:
                    return result(kind, self.inner_dim, value.factor * found.factor)  # type: ignore[arg-type]
        return None

    def _of_gradient(self, node: Node, left: Node, right: Node) -> Value | None:
        """The gradient of the probabilities: of the output's gradient and value."""
        for one, other in (("G", "V"), ("V", "G")):
            a = self.named.get(one, {}).get(left)  # type: ignore[call-overload]
            b = self.named.get(other, {}).get(right)  # type: ignore[call-overload]
            if a is None or b is None:
                continue
            of_left, of_right = self.atoms.resolved(a.labels), self.atoms.resolved(b.labels)
            fits = of_left[:-2] == of_right[:-2] and of_left[-1] == of_right[-2] == self.atoms.atoms(self.value_dim)
            if fits:
                kind: Kind = "dD" if self.random else "dP"
                return Value(kind, (*of_left[:-1], of_right[-1]), a.factor * b.factor)
        return None

    def _take_gradient(self, node: Node) -> None:
        """Name the gradient of the output as what is multiplied by value in this product."""
        left, right = node.args
        assert isinstance(left, Node)
        assert isinstance(right, Node)
        for value, other, is_left in ((left, right, True), (right, left, False)):
            named = self.named["V"].get(value)
            if named is None or "G" in self.named:
                continue
            labels = self.atoms.resolved(named.labels)
            lead, (outer, inner) = labels[:-2], labels[-2:] if is_left else labels[:-3:-1]
            if (outer, inner) == (self._keys, self.atoms.atoms(self.value_dim)):
                rows = self.query_dim
                self._operand("G", other, (*lead, inner, rows) if is_left else (*lead, rows, inner))
                self._push(node)


_RULES = {
    "aten::amax": Values._maximum,
    "aten::max": Values._maximum_and_place,
    "aten::eq": Values._flag,
    "aten::ne": Values._flag,
    "aten::abs": Values._flag,
    "aten::logical_not": Values._flag,
    "aten::any": Values._flag,
    "aten::all": Values._flag,
    "aten::mul": Values._mul,
    "aten::div": Values._div,
    "aten::sub": Values._sub,
    "aten::rsub": Values._rsub,
    "aten::add": Values._add,
    "prims::fma": Values._fma,
    "aten::sum": Values._sum,
    "aten::where": Values._where,
    "aten::scatter": Values._scatter,
    "aten::slice": Values._slice,
    "aten::slice_scatter": Values._beside_zero,
    "aten::constant_pad_nd": Values._beside_zero,
}


def _widens(source: object, node: Node) -> bool:
    """Whether a cast loses nothing that kernels have: the source may be read in the place of its result."""
    assert isinstance(source, Node)
    old, new = source.meta["val"].dtype, node.meta["val"].dtype
    return bool(old == new or (old.itemsize < new.itemsize and new != torch.float64))


def _new_dimension(node: object, dim: int) -> Dimension:
    """A dimension of a tensor that is labelled nowhere else; none of size 1."""
    assert isinstance(node, Node)
    size = shape_of(node)[dim]
    return () if static(size) == 1 else (Atom(size),)


def _sizes(labels: Labels) -> list[Dim]:
    return [math.prod(atom.size for atom in dimension) for dimension in labels]


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 * max(abs(a), abs(b))


def _is_size(value: object, size: object) -> bool:
    value = value.meta.get("val") if isinstance(value, Node) else value
    return value is not None and same(value, size)  # type: ignore[arg-type]
