"""An attention as a frontend finds it in a graph: tensors that it reads as views, results as sinks, or why it is kept.

A frontend knows the operators of one origin.  After it, nothing knows an operator by its name: passes ask views for
the nodes that are there now, and sinks take the results of other operators.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..graph import sizes
from ..graph.emit import Emitter
from ..graph.nodes import Argument, is_alias, op_name, origin
from ..graph.views import viewed
from ..model.call import Order
from ..model.mask import Band
from ..model.plan import Kept
from ..model.reasons import Reason
from ..records.records import Tensors

Axes = Literal["bhsd", "bshd", "thd"]
"""The dimensions of query, key, value, output and their gradients: [batch, heads, length, head dim], [batch, length,
heads, head dim], or [tokens, heads, head dim] of documents that lie one behind the other, which is one batch element of
all tokens."""

_HEADS_FIRST = (0, 2, 1, 3)
"""From "bshd" to "bhsd", and back."""

OURS = "dash_inductor::attention_backward"
"""The beginning of the names of our own backwards, which may read a forward that stays."""


class NotReadable(Exception):
    """Raised while an attention is read: it is `kept`."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.kept = Kept(reason, detail)


def heads_first(value: Tensor, axes: Axes) -> Tensor:
    """The tensor as [batch, heads, length, head dim]."""
    if axes == "thd":
        value = value.unsqueeze(0)
    return value if axes == "bhsd" else value.transpose(1, 2)


def between(emitter: Emitter, node: Node, axes: Axes, before: Node) -> Node:
    """The node that our operators read where the graph has `node`, or the graph where they have it: without copies.

    Packed tokens, [tokens, heads, head dim], are the same for both.
    """
    if axes != "bshd":
        return node
    source = origin(node)
    if op_name(source) == "aten::permute" and tuple(source.args[1]) == _HEADS_FIRST:  # type: ignore[arg-type]
        found = source.args[0]
        assert isinstance(found, Node)
        return found
    return emitter.call(torch.ops.aten.permute.default, (node, list(_HEADS_FIRST)), before=before, like=node)


@dataclass(frozen=True)
class View:
    """A tensor that an attention reads: where it finds its node, and the dimensions that it has."""

    argument: Argument
    axes: Axes = "bhsd"

    @property
    def node(self) -> Node:
        """The node that is read now; replacing another attention may put a new one there."""
        found: Node = self.argument.value
        return found

    @property
    def tensor(self) -> Tensor:
        """The value of the node, [batch, heads, length, head dim]."""
        return heads_first(self.node.meta["val"], self.axes)

    def dim(self, dim: int) -> int:
        """The dimension of the node that is this one of [batch, heads, length, head dim]."""
        return _HEADS_FIRST[dim] if self.axes == "bshd" else dim


class Sink(Protocol):
    """A place of the graph that takes a result."""

    @property
    def axes(self) -> Axes | None:
        """The dimensions of the node that has the result; None where they are other ones."""

    @property
    def used(self) -> Node | None:
        """The node that has the result of the operator, None where nothing uses it."""

    @property
    def order(self) -> Order | None:
        """The dimensions that the graph expects, of [batch, heads, length, head dim], from the largest stride to the
        smallest; None if they are not dense.
        """

    @property
    def users(self) -> list[Node]:
        """The nodes of the program that read it."""

    def put(self, emitter: Emitter, result: Node, before: Node) -> tuple[Node, Node] | None:
        """The node that the rest of the graph reads, and the one that takes its place, made of `result`; None if
        another sink gives both, because the node has several results.
        """


@dataclass(frozen=True)
class Output:
    """A sink: one of the results of a node, as its getitem has it."""

    node: Node
    index: int
    axes: Axes = "bhsd"

    @property
    def readers(self) -> list[Node]:
        """The getitems, whether something uses them or not."""
        return [user for user in self.node.users if _is_result(user, self.index)]

    @property
    def used(self) -> Node | None:
        return next((reader for reader in self.readers if reader.users), None)

    @property
    def users(self) -> list[Node]:
        used = self.used
        return [] if used is None else list(used.users)

    @property
    def order(self) -> Order | None:
        used = self.used
        value = self.node.meta["val"][self.index] if used is None else used.meta["val"]
        if not isinstance(value, Tensor):  # it is not wanted
            return (0, 1, 2, 3)
        value = heads_first(value, self.axes)
        return sizes.dense_order(value.shape, value.stride())

    def put(self, emitter: Emitter, result: Node, before: Node) -> tuple[Node, Node]:
        used = self.used
        assert used is not None
        return used, between(emitter, result, self.axes, before)


@dataclass(frozen=True)
class Inputs:
    """The tensors and numbers from which one node of an attention computes.

    Attributes:
        query, key, value: the tensors.
        scale, dropout: numbers or nodes that have them; a scale of None is the operator's own.
        flags: the band that flags of the operator tell without a guard; None where it takes `band` to know it.
        band: the band of the operator's own, which may guard a number.

            Raises:
                NotReadable: the operator means something else than a band.
        mask: a mask tensor, additive or boolean, that broadcasts to the scores; None without one.
        mask_text: the mask in words, for the record of one that is not read; by default its size and type are told.
        documents: the beginnings of documents, one behind the other, which alone see each other (see `Documents`).
        data: the nodes from which it is computed who sees whom, beside the band.
        modifiers: what changes scores, by its name in `model.call.MODIFIERS`: a number, a node that has one, or None.
        bias: a tensor of floats that is added to the scores beside the mask, broadcasts to them; None without one.
        slopes: fp32 [heads] or [batch, heads]: of ALiBi, ``-slope * |i + kv_len - q_len - j|`` is added to the score of
            query i and key j; None without them.
        sinks: further scores, which take part in the softmax and have no value: floats that broadcast to [batch, heads,
            q_len, 1]; None without them.
        mask_only: why the mask cannot be added to the scores where it is not read as a mask; "" if it can.
        mask_as_floats: what is added to the scores where the mask is not read; None if that is the mask itself.
    """

    query: View
    key: View
    value: View
    scale: object
    dropout: object
    flags: Band | None
    band: Callable[[], Band]
    mask: Argument | None = None
    documents: Argument | None = None
    data: tuple[Node, ...] = ()
    modifiers: Mapping[str, object] = field(default_factory=dict)
    bias: Argument | None = None
    slopes: Argument | None = None
    mask_text: str = ""
    sinks: Argument | None = None
    mask_only: str = ""
    mask_as_floats: Argument | None = None


@dataclass(frozen=True)
class Forward:
    """A forward.

    Attributes:
        node: the call; it is erased once it is replaced.  Of attention by several nodes, the one that makes the output.
        inputs: its operands.
        out, logsumexp: its results.  The latter is a `LogSumExp` where the program may read it, too; a program's own
            softmax has none.
        draws: the nodes that draw random numbers for it, which are erased with it if nothing else reads them.
        sizes: nodes that ask for a size of a tensor that is gone with it, and sizes of operands with the same product.
        not_read: backwards without dropout that are given its random state, and are not its own; they read nothing of
            it, and are replaced first.
    """

    node: Node
    inputs: Inputs
    out: Sink
    logsumexp: Output | None
    draws: tuple[Node, ...] = ()
    sizes: tuple[tuple[Node, tuple[tuple[View, int], ...]], ...] = ()
    not_read: frozenset[Node] = frozenset()

    @property
    def order(self) -> Order | None:
        """The dimensions of the output, as `Sink.order`."""
        return self.out.order

    def given(self, backwards: Set[Node] = frozenset()) -> set[int | None]:
        """The results that something else than these backwards uses, by their numbers; None for all of them."""
        return {
            user.args[1] if user.target is operator.getitem else None  # type: ignore[misc]
            for user in self.node.users
            if user.target is not operator.getitem or not _only_used_by(user, backwards)
        }


@dataclass(frozen=True)
class Gradient:
    """The gradient of a log-sum-exp.

    Attributes:
        argument: the place that has it, floats [batch, heads, length].
        factor: times this it is the gradient of the natural logarithm.
    """

    argument: Argument
    factor: float = 1.0


class TensorGradient(Protocol):
    """The gradient of a tensor that a bias is computed from, as a function of the gradient of the bias."""

    @property
    def gradient(self) -> Node:
        """The gradient in the graph."""

    def put(self, emitter: Emitter, of_bias: Node, before: Node) -> tuple[Node, Node]:
        """The gradient in the graph, and the node that takes its place, made of the gradient of the bias."""


@dataclass(frozen=True)
class Backward:
    """A backward.

    Attributes:
        node: the call; it is erased once it is replaced.
        inputs: its operands.
        grad_out, out: the gradient of the output, and the output; None where the backward reads no output, so that only
            our forward makes what ours reads.
        logsumexp: the argument that has the log-sum-exp, fp32 [batch, heads, >= length] or with a dimension of size 1
            behind; None if only a forward of the same origin makes what it reads.
        gradients: of query, key and value.
        bias_gradient: of the mask; None where the call computes none.
        sink_gradient: of the sinks, [batch, heads, q_len, 1]; None where the call computes none.
        random_state: the arguments that tell which random numbers the forward drew for dropout.
        grad_logsumexp: of the log-sum-exp; None where it has none.
        merged: the forwards of the graph from whose results `out` and `logsumexp` are computed; empty where these are
            results of one forward, or come from elsewhere.
        tensor_gradients: gives, when it is called, the gradients of tensors from which `inputs.bias` is computed, as
            far as the graph uses them.

            Raises:
                NotReadable: one of them does not follow from the gradient of the bias.
    """

    node: Node
    inputs: Inputs
    grad_out: View
    out: View | None
    logsumexp: Argument | None
    gradients: tuple[Sink, Sink, Sink]
    bias_gradient: Sink | None = None
    sink_gradient: Sink | None = None
    random_state: tuple[Argument, ...] = ()
    grad_logsumexp: Gradient | None = None
    merged: tuple[Node, ...] = ()
    tensor_gradients: Callable[[], tuple[TensorGradient, ...]] = tuple


def _none() -> None:
    return None


@dataclass(frozen=True)
class Attention:
    """An attention that may be replaced: a backward with the forward that it belongs to, or a forward alone.

    Attributes:
        forward: None if it is in no graph that is seen here.  Several backwards may have the same one.
        backward: None if nothing in the graph is the backward of the forward.
        forward_op: the name of the operator of the forward.
        refusal: says, before anything else is read, why a frontend does not replace such a call; it may guard a number.
        note: a note of the frontend for the record.
        one_operator: whether it is a call of one operator, forward or backward; else `forward_op` names it.
    """

    forward: Forward | None
    backward: Backward | None
    forward_op: str
    refusal: Callable[[], Kept | None] = _none
    note: str = ""
    one_operator: bool = True

    @property
    def node(self) -> Node:
        """The node that has the name of the site: the backward, or the forward alone."""
        found = self.backward or self.forward
        assert found is not None
        return found.node

    @property
    def inputs(self) -> Inputs:
        """The operands of `node`."""
        found = self.backward or self.forward
        assert found is not None
        return found.inputs

    @property
    def has_backward(self) -> bool:
        return self.backward is not None

    @property
    def op(self) -> str:
        """The name of the operator of `node`."""
        return op_name(self.node) if self.one_operator else self.forward_op

    @property
    def place(self) -> Node | None:
        """The node of the forward; None if it is not in this graph."""
        return None if self.forward is None else self.forward.node

    @property
    def tensors(self) -> Tensors | None:
        """The sizes of query, key and value, for the record."""
        views = self.inputs.query, self.inputs.key, self.inputs.value
        return tensors_of([view.node for view in views], views[0].axes)

    @property
    def lines(self) -> Iterable[Node]:
        """The nodes that may tell the line of the model."""
        return [self.node, *self.node.users]


@dataclass(frozen=True)
class Refusal:
    """An attention that its frontend never replaces.

    Attributes:
        node: the node that has the name of the site.
        op: the name of the operator.
        kept: the reason.
        has_backward: whether it is a backward, or has one in the graph.
        tensors: the sizes of query, key and value; None where they cannot be told.
        place: the node of the forward; None if it is not known.
        everywhere: whether the reason is the same on devices on which no attention is replaced.
    """

    node: Node
    op: str
    kept: Kept
    has_backward: bool
    tensors: Tensors | None
    place: Node | None = None
    everywhere: bool = False
    of_line: tuple[Node, ...] = ()

    @property
    def lines(self) -> Iterable[Node]:
        """The nodes that may tell the line of the model."""
        return self.of_line or [self.node, *self.node.users]


Found = Attention | Refusal


class Frontend(Protocol):
    """One way in which attention comes into a graph."""

    def __call__(self, graph: Graph) -> Iterator[Found]:
        """The attentions of a graph, in the order of their nodes; nothing is changed and nothing guarded.

        Only when its tensors are asked for, an attention may add nodes to the graph, which are drafts (`graph.drafts`).
        """


def is_alone(forward: Node, backwards: Set[str] = frozenset()) -> bool:
    """Whether no attention backward, one of these operators or one of ours, reads a result of a forward."""
    return not any(_leads_to(user, backwards) for user in forward.users)


def _leads_to(node: Node, backwards: Set[str]) -> bool:
    """Whether a result of a forward, or a view of one, is read by a backward."""
    if op_name(node) in backwards or op_name(node).startswith(OURS):
        return True
    shows = node.target is operator.getitem or viewed(node) is not None
    return shows and any(_leads_to(user, backwards) for user in node.users)


def _is_result(node: Node, index: int) -> bool:
    return node.target is operator.getitem and bool(node.args[1] == index)


def _only_used_by(node: Node, allowed: Set[Node]) -> bool:
    return all(u in allowed or (is_alias(u) and _only_used_by(u, allowed)) for u in node.users)


def tensors_of(nodes: Iterable[object], axes: Axes = "bhsd") -> Tensors | None:
    """The record of query, key and value; None where they are something else than tensors."""
    values = [node.meta.get("val") if isinstance(node, Node) else None for node in nodes]
    found = [value for value in values if isinstance(value, torch.Tensor)]
    if axes == "bshd":
        found = [heads_first(value, axes) for value in found if value.dim() == 4]
    if len(found) != 3:
        return None
    query, key, value = (tuple(map(sizes.static, tensor.shape)) for tensor in found)
    return Tensors(query, key, value, str(found[0].dtype).removeprefix("torch."), str(found[0].device))
