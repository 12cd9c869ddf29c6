"""Frontend for decomposed attention: finds softmaxes between two matrix products, and their derivatives.

Inductor decomposes a softmax into maximum, difference, exponential, sum and quotient, and decomposes its backward too;
SDPA's math backend consists of the same operators.  An attention is replaced if every reader of every node between the
products is known to belong to it (see `values` for how nodes are identified).  Any other softmax between two products
is not replaced, and the record names the node that prevents its replacement.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
from collections.abc import Iterator, Set
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ...errors import described
from ...graph import backward, sizes
from ...graph.nodes import Argument, bind, op_name
from ...graph.numbers import holds_all
from ...graph.temporaries import Temporaries, users
from ...model.mask import Band
from ...model.plan import Fallback
from ...model.reasons import Reason
from .. import math_backend
from ..attention import Attention, Backward, Forward, Found, Inputs, Refusal, Sink, Size, View
from ..repeat_kv import Unused
from ..scores import ONLY_READ
from ..unread.words import COMBINED, SUMS
from .factors import check_factor, factors_of, gradients_of_factor
from .labels import CAST, COPIES, VIEWS, is_float, permutation, shape_of
from .masks import mask_and_bias_of, must_be_read
from .one_more import OneMore, read_one_more
from .places import Reader, Result, Roles
from .scores import PRODUCTS, NotAttention, Stuck, constant_factor, find_scores
from .value import Kind, Value
from .values import Values

log = logging.getLogger("dash_inductor")

OP = "softmax by hand"
NOTE = "computed by hand: ours does not round scores and probabilities in between, and is more precise for it"
WIDE = "computed by hand, in float32: ours multiplies the 16-bit numbers that were converted, as fused attention does"


@dataclass(frozen=True)
class _Softmax:
    """The nodes of a softmax, the dimension of the sum, and what is added to the sum.

    Attributes:
        exponential, quotient: the exponential, and what it gives divided by its sum.
        totals: the sum, and the sum with what is added to it.
        dim: the dimension of the sum.
        one_more: what is added; None for nothing.
    """

    exponential: Node
    totals: tuple[Node, ...]
    quotient: Node
    dim: int
    one_more: OneMore | None = None


def find(graph: Graph) -> Iterator[Found]:
    """Yield the decomposed attentions of a graph; implements `Frontend`.

    Adds temporary nodes (`graph.temporaries`), which stay only if a replaced attention reads them.
    """
    of_math = {refusal.node: refusal for refusal in math_backend.find(graph) if isinstance(refusal, Refusal)}
    softmaxes = list(_softmaxes(graph))
    if not softmaxes:
        yield from of_math.values()
        return
    places = {node: number for number, node in enumerate(graph.nodes)}
    known = _Known(places, backward.of_backward(graph), set(), Temporaries(graph))
    found = [_read(softmax, known, of_math) for softmax in softmaxes]
    yield from of_math.values()
    matches = [match for match in found if isinstance(match, _Match)]
    yield from (refusal for refusal in found if isinstance(refusal, Refusal))
    for match in matches:
        with contextlib.suppress(Exception):  # `attention` below raises it again
            known.avoid.update(match.inside())
    for match in matches:  # only now, because it adds users to nodes
        try:
            attention: Found = match.attention()
        except Stuck as error:
            attention = match.of_math or _refusal(match.softmax, Fallback(Reason.UNSUPPORTED_OP, str(error)), known)
        except Exception as error:
            attention = _failure(match.softmax, error, known)
        yield attention


def _read(softmax: _Softmax, known: _Known, of_math: dict[Node, Refusal]) -> _Match | Refusal | None:
    """Return an attention, or the refusal that records why it is not replaced.

    Return None for other softmaxes, and for those of SDPA's math backend that are not replaced, whose refusals stay in
    `of_math`.
    """
    own = next((node for node in of_math if _is_of(node, softmax)), None)
    try:
        match = _match(softmax, known)
    except NotAttention:
        return None
    except Stuck as error:
        if own is not None or not _is_between_products(softmax, known.of_backward):
            return None
        return _refusal(softmax, Fallback(Reason.UNSUPPORTED_OP, str(error)), known)
    except Exception as error:
        return None if own is not None else _failure(softmax, error, known)
    if isinstance(match, Fallback):
        return None if own is not None else _refusal(softmax, match, known)
    if own is not None:
        if match.values.dtype is None:
            return None
        match.of_math = of_math.pop(own)
    return match


def _softmaxes(graph: Graph) -> Iterator[_Softmax]:
    seen = set[Node]()
    for node in graph.nodes:
        if op_name(node) != "aten::div" or len(node.args) != 2:
            continue
        exponential, total = node.args
        if not isinstance(exponential, Node) or not isinstance(total, Node) or op_name(exponential) != "aten::exp":
            continue
        for whole, added in _summands(total):
            args = bind(whole) if op_name(whole) == "aten::sum" else {}
            is_sum = bool(args) and args["self"] is exponential and len(args.get("dim") or ()) == 1 and args["keepdim"]
            if not is_sum:
                continue
            dim = args["dim"][0] % len(shape_of(node))
            if whole is total:
                yield _Softmax(exponential, (total,), node, dim)
                break
            one_more = read_one_more(exponential, added, dim)
            if one_more is not None and total not in seen:  # the backward divides by it again
                seen.add(total)
                yield _Softmax(exponential, (whole, total), node, dim, one_more)
                break


def _summands(total: Node) -> Iterator[tuple[Node, object]]:
    """Yield a node and None, and each summand of a sum of two with the other one."""
    yield total, None
    if op_name(total) == "aten::add" and len(total.args) == 2 and not total.kwargs:
        yield from ((a, b) for a, b in (total.args, total.args[::-1]) if isinstance(a, Node))


def _is_of(node: Node, softmax: _Softmax) -> bool:
    """Return whether a node that SDPA's math backend added belongs to this softmax."""
    return node in (softmax.exponential, *softmax.totals, softmax.quotient) or any(
        node is source for source in _row_nodes(softmax)
    )


def _row_nodes(softmax: _Softmax) -> list[Node]:
    difference = softmax.exponential.all_input_nodes
    return [*difference, *(source for node in difference for source in node.all_input_nodes)]


@dataclass(frozen=True)
class _Known:
    """What is known of a graph.

    Attributes:
        place: the index of each node in the graph.
        of_backward: the nodes that depend on gradients.
        avoid: the nodes that will be erased because an attention is replaced.
        temporaries: adds temporary nodes.
    """

    place: dict[Node, int]
    of_backward: Set[Node]
    avoid: set[Node]
    temporaries: Temporaries


@dataclass
class _Match:
    """A softmax all of whose nodes are identified.

    Attributes:
        softmax: its nodes.
        values: the values of the nodes around it.
        reader: finds its operands and results.
        of_math: the refusal to record if it comes from SDPA's math backend and is not replaced.
    """

    softmax: _Softmax
    values: Values
    reader: Reader
    of_math: Refusal | None = None

    def places(self) -> tuple[Node, Node, Node, float, Result, tuple[Sink, Sink, Sink]]:
        """Return query, key, value, the scale of the scores, and the sinks of the output and of the three gradients.

        Raises:
            Stuck: a result differs from that of attention by a factor.
        """
        values, reader, scores = self.values, self.reader, self.values.scores
        dtype = values.dtype
        query, key, value = (reader.operand(kind, dtype) for kind in ("Q", "K", "V"))
        of_query, of_key = reader.factor("Q", query), reader.factor("K", key)
        scale = scores.outer * scores.inner / (of_query * of_key)
        scale *= reader.factor("Q", values.chains["Q"][-1]) * reader.factor("K", values.chains["K"][-1])
        rescale = 1 / (1 - values.dropout)

        def gradient(kind: Kind, factor: float, node: Node) -> Sink:
            if kind not in values.results:
                return Unused()
            return reader.result(kind, factor, node.meta["val"].dtype, node)

        gradients = (
            gradient("dQ", scale * of_key, query),
            gradient("dK", scale * of_query, key),
            gradient("dV", rescale, value),
        )
        return query, key, value, scale, reader.result("O", rescale, query.meta["val"].dtype), gradients

    def inside(self) -> set[Node]:
        """Return the nodes that are erased when this attention is replaced; no other attention may read them."""
        *_, out, gradients = self.places()
        results = [sink for sink in (out, *gradients) if isinstance(sink, Result)]
        return set().union(*(result.before for result in results))

    def attention(self) -> Attention:
        """Return the matched attention, with query, key and value as [batch, heads, length, head dim].

        The views that this takes are added to the graph as temporary nodes.

        Raises:
            Stuck: views cannot bring a tensor's dimensions into this order, or the backward comes before the forward.
        """
        values, reader, scores = self.values, self.reader, self.values.scores
        query, key, value, scale, out, gradients = self.places()
        own = query.meta["val"].dtype
        if "G" in values.named:
            first = min(
                (user for node in values.named["G"] for user in node.users if user in values.known),
                key=lambda node: values.place[node],
            )
            if not values.results["O"] < first:
                raise Stuck(first, "the backward stands in front of the forward")
        bias_gradient = self._bias_gradient()
        mask, bias = mask_and_bias_of(reader)
        nothing = Band()
        inputs = Inputs(
            View(reader.view("Q", query)),
            View(reader.view("K", key)),
            View(reader.view("V", value)),
            scale,
            values.dropout,
            flags=nothing,
            band=lambda: nothing,
            mask=None if mask is None else reader.place(mask),
            bias=None if bias is None else reader.place(bias),
            data=tuple(tensor for tensor in (mask, bias) if tensor is not None),
            modifiers={} if scores.tanh is None else {"softcap": scores.outer},
            sinks=self._sinks(),
            factors=factors_of(reader),
            mask_only=ONLY_READ if must_be_read(scores.terms) else "",
        )
        backward = None
        if "G" in values.named:
            backward = Backward(
                first,
                inputs,
                grad_out=View(reader.view("G", reader.operand("G", own), own)),
                out=None,
                logsumexp=None,
                gradients=gradients,
                bias_gradient=bias_gradient,
                sink_gradient=self._sink_gradient(),
                factor_gradients=functools.partial(tuple, gradients_of_factor(reader)),
            )
        draws = (*values.random, *(node for drawn in values.random[1:] for node in drawn.all_input_nodes))
        draws += tuple(values.idle())
        forward = Forward(values.results["O"], inputs, out, None, draws, sizes=tuple(self._sizes(inputs)))
        wide = values.results["O"].meta["val"].dtype.itemsize > own.itemsize
        with_sinks = scores.sink is not None or scores.one_more is not None
        note = (WIDE if wide else NOTE) + ("; with sinks" if with_sinks else "")
        return Attention(
            forward, backward, OP if self.of_math is None else math_backend.OP, note=note, one_operator=False,
        )  # fmt: skip

    def _sizes(self, inputs: Inputs) -> Iterator[Size]:
        """Yield sizes that the program asks of tensors between the products, as products of sizes of query and key.

        Scores with a column for sinks have one more.
        """
        places = [(view, dim) for view in (inputs.query, inputs.key) for dim in range(4)]
        columns = (0, 1) if self.values.scores.has_column else (0,)
        for node in _asked(self.values):
            ways = itertools.chain(zip(places, strict=True), itertools.combinations(places, 2))
            for parts, more in itertools.product(ways, columns):
                size = math.prod(shape_of(view.node)[dim] for view, dim in parts)
                if sizes.same(size + more, node.meta["val"]):
                    yield Size(node, parts, more)
                    break
            else:
                raise Stuck(node, "a size that no operand has")

    def _bias_gradient(self) -> Result | None:
        """Return the sink of the gradient of the scores that the program reads as the gradient of a mask or bias.

        Return None if the program does not read it.
        """
        asked = set(_asked(self.values))
        strangers = [pair for pair in self.values.strangers() if pair[1] not in asked]
        if not strangers:
            return None
        ways = [_to_gradient_of_bias(self.values, node) for node, _ in strangers]
        node = ways[0][-1]
        kept = set[Node]().union(*ways)  # the program computes the gradients of summands before factors from it
        own = frozenset(user for user in node.users if user in self.values.known and user not in kept)
        reader = self.reader
        return Result(node, self.values.known[node].labels, reader.roles.of_kind("score"), self.values.atoms, own)

    def _sinks(self) -> Argument | None:
        scores = self.values.scores
        if scores.one_more is not None:
            assert scores.product is not None
            facts = {"dtype": torch.float32, "device": scores.product.meta["val"].device, "like": scores.product}
            full = torch.ops.aten.full.default
            return self.reader.place(self.reader.temporaries.call(full, [1] * 4, scores.one_more, **facts))
        if scores.sink is None:
            return None
        atoms = self.values.atoms
        own = tuple(() if atoms.atoms(d) == atoms.atoms(scores.wide_dim) else d for d in scores.labels[self._cat()])
        shape = shape_of(scores.sink)
        own = tuple(() if sizes.static(n) == 1 else d for n, d in zip(shape, own, strict=True))
        present = {atom for d in atoms.resolved(own) for atom in d}
        wanted = tuple(d if set(d) <= present else () for d in atoms.resolved(self.reader.roles.of_kind("score")))
        return self.reader.place(self.reader.in_four(scores.sink, own, wanted))

    def _cat(self) -> Node:
        (found,) = [node for node in self.values.scores.labels if op_name(node) == "aten::cat"]
        return found

    def _sink_gradient(self) -> Result | None:
        values = self.values
        all_ = [node for node, value in values.known.items() if value.kind == "dsink"]
        if not all_:
            return None
        found = [node for node in all_ if not node.users or not set(node.users) <= set(all_)]  # others are casts
        if len(found) != 1 or abs(values.known[found[0]].factor - 1) > 1e-5:
            raise Stuck(found[0], "the gradient of the sinks")
        batch, heads, queries, _ = self.reader.roles.of_kind("score")
        return Result(found[0], values.known[found[0]].labels, (batch, heads, queries, ()), values.atoms)


def _match(softmax: _Softmax, known: _Known) -> _Match | Fallback:
    """Identify all nodes of an attention by their values; return the match, or why the attention is not replaced.

    Raises:
        Stuck: a node does not belong to attention.
        NotAttention: the softmax is certainly not part of attention.
    """
    exponent, one_more = softmax.exponential.args[0], softmax.one_more
    assert isinstance(exponent, Node)
    if one_more is None:
        scores = find_scores(exponent, softmax.dim)
    else:
        scores = find_scores(one_more.scores, softmax.dim, one_more.score)
    values = Values(scores, known.place, known.of_backward)
    values.run(softmax.exponential, softmax.totals, softmax.quotient, one_more)
    if "O" not in values.results:
        raise Stuck(softmax.quotient, _readers(softmax.quotient, known.of_backward))
    reader = Reader(known.temporaries, values, Roles.of(values), known.avoid)
    double = next((node for node in values.known if is_float(node) and node.meta["val"].dtype == torch.float64), None)
    if double is not None:
        return Fallback(Reason.DTYPE, f"computed in float64 ({_name(double)})")
    check_factor(values)
    _check_roundings(values)
    values.release_others()
    biased = any(term.kind == "add" for term in scores.terms)
    if biased:
        values.release_zeros()
    asked = set(_asked(values))
    strangers = [(node, user) for node, user in values.strangers() if user not in asked]
    if biased:  # a mask or bias may have a gradient
        of_bias = {node: way[-1] for node, _ in strangers if (way := _to_gradient_of_bias(values, node))}
        if len(set(of_bias.values())) == 1:
            strangers = [(node, user) for node, user in strangers if node not in of_bias]
    strangers.sort(key=lambda pair: (pair[1] in known.of_backward, known.place[pair[1]]))
    for node, user in strangers:
        if user.op == "output" or user not in known.of_backward:
            return Fallback(
                Reason.PROBABILITIES_USED, f"{_words(values.known[node])} ({node.name}) is read by {_name(user)}"
            )
        return Fallback(
            Reason.UNSUPPORTED_OP,
            f"in the backward, {_words(values.known[node])} ({node.name}) is read by {_name(user)}",
        )
    return _Match(softmax, values, reader)


def _check_roundings(values: Values) -> None:
    """Check that no conversion between the products loses more precision than the kernels do.

    Mixed precision rounds scores, probabilities and their gradients to the dtype of the operands.

    Raises:
        Stuck: a conversion rounds to another dtype.
    """
    own = values.dtype
    for node in values.known:
        if op_name(node) != CAST or not is_float(node) or not is_float(node.args[0]):
            continue
        dtype = node.meta["val"].dtype
        if own is not None and not holds_all(dtype, own):
            raise Stuck(node, f"rounds to {str(dtype).removeprefix('torch.')}, where the operands are {own}")


def _asked(values: Values) -> Iterator[Node]:
    """Yield the nodes that ask for a size of one of attention's own nodes."""
    for user in dict.fromkeys(user for _, user in values.strangers()):
        if op_name(user) == "aten::sym_size":
            yield user


def _to_gradient_of_bias(values: Values, node: Node) -> list[Node]:
    """Return the nodes from a constant multiple of the gradient of the scores back to that gradient itself.

    Return an empty list for other nodes.
    """
    way = [node]
    while abs(values.known[node].factor - 1) > 1e-5:
        step, moves = constant_factor(node), op_name(node) in (CAST, *COPIES, *VIEWS) or permutation(node) is not None
        source = step[0] if step is not None else node.args[0] if moves else None
        if not isinstance(source, Node) or source not in values.known:
            return []
        node = source
        way.append(node)
    value = values.known[node]
    own = values.atoms.atoms(values.scores.key_dim) in values.atoms.resolved(value.labels)
    return way if value.kind == "dS" and own else []


def _name(node: Node) -> str:
    return f"{op_name(node) or node.op} ({node.name})"


def _readers(node: Node, of_backward: Set[Node]) -> str:
    """Return which nodes of the forward read probabilities, through conversions.

    If one of them is a sum or difference with a tensor of their shape, return that alone.
    """
    stack, found = list(node.users), list[Node]()
    for user in stack:
        name = op_name(user)
        if user in of_backward:
            continue
        if name in (CAST, *COPIES, *VIEWS):
            stack += user.users
            continue
        found.append(user)
        if name == "aten::mul":
            stack += (reader for reader in user.users if op_name(reader) in SUMS)
        parts = user.all_input_nodes
        if name in SUMS and len(parts) == 2 and all(sizes.same_all(shape_of(part), shape_of(user)) for part in parts):
            return f"{COMBINED} ({user.name})"
    return "its probabilities are read by " + ", ".join(map(_name, found[:4]))


def _words(value: Value) -> str:
    words = {"P": "the softmax", "D": "the softmax with dropout", "score": "the matrix of scores"}
    return words.get(value.kind, value.kind)


def _refusal(softmax: _Softmax, fallback: Fallback, known: _Known) -> Refusal:
    own = [softmax.exponential, *softmax.totals, softmax.quotient]
    has_backward = backward.has_backward(own, known.of_backward)
    return Refusal(softmax.quotient, OP, fallback, has_backward, None, place=softmax.quotient)


def _failure(softmax: _Softmax, error: Exception, known: _Known) -> Refusal:
    """Return the refusal of a softmax whose reading raised an unexpected exception."""
    log.debug("softmax %s", softmax.quotient, exc_info=error)
    text = described(error)
    return _refusal(softmax, Fallback(Reason.INTERNAL_ERROR, text), known)


def _is_between_products(softmax: _Softmax, of_backward: Set[Node]) -> bool:
    """Return whether the softmax lies between a product and a product over the same keys.

    Only tensors with as many elements as the softmax connect it to the products, apart from a concatenated sink.
    """
    whole = math.prod(shape_of(softmax.exponential))
    keys = shape_of(softmax.exponential)[softmax.dim]

    def is_plane(node: Node) -> bool:
        close = op_name(node) in ("aten::cat", "aten::slice")
        return is_float(node) and (close or sizes.same(math.prod(shape_of(node)), whole))

    behind, found = [softmax.exponential], False
    seen: set[Node] = set()
    while behind and not found and len(seen) < 400:
        node = behind.pop()
        if node in seen:
            continue
        seen.add(node)
        found = op_name(node) in (*PRODUCTS, "aten::baddbmm", "aten::addmm")
        beside_sink = op_name(node) == "aten::cat"
        behind += [
            source for source in node.all_input_nodes if beside_sink or is_plane(source) or _is_wide(source, node)
        ]
    if not found:
        return False
    ahead = [softmax.quotient]
    reached: set[Node] = set()
    while ahead and len(reached) < 400:
        node = ahead.pop()
        if node in reached:
            continue
        reached.add(node)
        for user in users(node):
            if user in of_backward:
                continue
            if op_name(user) in (*PRODUCTS, "aten::baddbmm"):
                left, right = user.args[-2:]
                sized = shape_of(left)[-1] if left is node else shape_of(right)[-2]  # type: ignore[arg-type]
                if sizes.same(sized, keys) or sizes.same(sized, keys - 1):
                    return True
            elif is_plane(user):
                ahead.append(user)
    return False


def _is_wide(source: Node, node: Node) -> bool:
    return op_name(node) == "aten::cat" and is_float(source)
