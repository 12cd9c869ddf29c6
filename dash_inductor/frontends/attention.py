"""The interface between frontends and rewriting: an attention found in a graph, with its inputs, outputs and gradients.

A frontend knows the operators of one origin (SDPA, flash-attn, FlexAttention, decomposed attention).  It describes the
tensors that an attention reads as `View`s and its results as `Sink`s, or says why the attention is not replaced.  Later
passes do not look at operator names: a view tells them which node to read, and a sink which node to replace.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..graph import sizes
from ..graph.emit import Emitter
from ..graph.nodes import Argument, is_alias, op_name, origin
from ..graph.views import viewed
from ..model.attention_spec import Order
from ..model.mask import Band
from ..model.plan import Fallback
from ..model.reasons import Reason
from ..records.records import Tensors
from .factors import NO_FACTORS, FactorGradient, Factors

Axes = Literal["bhsd", "bshd", "thd"]
"""The dimensions of query, key, value, output and their gradients: "bhsd" is [batch, heads, length, head dim], "bshd"
is [batch, length, heads, head dim], "thd" is [tokens, heads, head dim] with all documents packed along the tokens
(varlen), which count as one batch element."""

_HEADS_FIRST = (0, 2, 1, 3)
"""The permutation from "bshd" to "bhsd"; it is its own inverse."""

OURS = "dash_inductor::attention_backward"
"""The name of this package's backward operator, which may read the results of a forward that is not replaced."""


class NotReadable(Exception):
    """Raised when an attention's inputs or its mask cannot be interpreted, so that the attention is not replaced.

    Attributes:
        fallback: the reason, for the record.
    """

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.fallback = Fallback(reason, detail)


def heads_first(value: Tensor, axes: Axes) -> Tensor:
    """Return a view of a tensor as [batch, heads, length, head dim]; "thd" becomes a batch of size 1.

    Args:
        value: the tensor.
        axes: the order of its dimensions.
    """
    if axes == "thd":
        value = value.unsqueeze(0)
    return value if axes == "bhsd" else value.transpose(1, 2)


def between(emitter: Emitter, node: Node, axes: Axes, before: Node) -> Node:
    """Convert a node from the graph's dimensions `axes` to those of this package's operators, or back, without a copy.

    For "bshd" this adds a permute to or from [batch, heads, length, head dim] before `before`; if `node` is that
    permute already, its source is returned.  The operators take "bhsd" and packed tokens as they are, so that `node`
    itself is returned.
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
    """A tensor that an attention reads: the operator argument that holds its node, and the order of its dimensions."""

    argument: Argument
    axes: Axes = "bhsd"

    @property
    def node(self) -> Node:
        """The graph node that the argument holds now; it may change when another attention is replaced."""
        found: Node = self.argument.value
        return found

    @property
    def tensor(self) -> Tensor:
        """The fake tensor of the node, as [batch, heads, length, head dim]."""
        return heads_first(self.node.meta["val"], self.axes)

    def dim(self, dim: int) -> int:
        """Return which dimension of the node's tensor is dimension `dim` of [batch, heads, length, head dim]."""
        return _HEADS_FIRST[dim] if self.axes == "bshd" else dim


class Sink(Protocol):
    """A result of an attention in the graph, which a replacement has to provide: the output or a gradient."""

    @property
    def axes(self) -> Axes | None:
        """The order of the dimensions of the result's node; None if it is not one of `Axes`."""

    @property
    def used(self) -> Node | None:
        """The graph node that holds the result; None if nothing uses the result."""

    @property
    def order(self) -> Order | None:
        """The layout that the graph expects: the dimensions of [batch, heads, length, head dim], from the largest
        stride to the smallest; None if the strides are not dense.
        """

    @property
    def users(self) -> list[Node]:
        """The nodes of the program that read the result."""

    def put(self, emitter: Emitter, result: Node, before: Node) -> tuple[Node, Node] | None:
        """Return (the node that the rest of the graph reads, its replacement, which is computed from `result`).

        If one node holds several results, the call for the last of them returns the pair; earlier calls return None.

        Args:
            emitter: adds nodes.
            result: the result of this package's operator.
            before: the node before which nodes are added.
        """


@dataclass(frozen=True)
class Output:
    """One of several results of an operator that returns a tuple, read by getitem; implements `Sink`."""

    node: Node
    index: int
    axes: Axes = "bhsd"

    @property
    def readers(self) -> list[Node]:
        """The getitem nodes that select this result, whether they are used or not."""
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
        if not isinstance(value, Tensor):  # the result is not computed
            return (0, 1, 2, 3)
        value = heads_first(value, self.axes)
        return sizes.dense_order(value.shape, value.stride())

    def put(self, emitter: Emitter, result: Node, before: Node) -> tuple[Node, Node]:
        used = self.used
        assert used is not None
        return used, between(emitter, result, self.axes, before)


@dataclass(frozen=True)
class Inputs:
    """The tensors and numbers that the forward or the backward of an attention reads.

    Attributes:
        query, key, value: the tensors.
        scale, dropout: the factor of the scores and the dropout probability, as numbers or nodes that hold them; a
            scale of None is the operator's default.
        flags: the band mask that flags such as `is_causal` give, if no guard is needed to know it; None if only `band`
            can tell it.
        band: returns the operator's own band mask; it may add a guard on a number.

            Raises:
                NotReadable: the operator's mask is not a band.
        mask: a mask tensor, additive or boolean, that broadcasts to the scores; None without one.
        mask_text: what a record shows of a mask that is not read; "" for the mask's size and dtype.
        documents: the offsets at which packed documents begin (``cu_seqlens``); a query sees only the keys of its own
            document (see `Documents`).  None without packing.
        data: the nodes that hold the mask, apart from the band: a mask tensor, document offsets, or the tensors that a
            mask_mod reads.
        modifiers: the parameters of score modifiers, such as the softcap, by their names in
            `model.attention_spec.MODIFIERS`: a number, a node that holds one, or None.
        bias: a float tensor that is added to the scores in addition to the mask and broadcasts to them; None without
            one.
        slopes: ALiBi slopes, fp32 [heads] or [batch, heads]: ``-slope * |i + kv_len - q_len - j|`` is added to the
            score of query i and key j; None without them.
        sinks: attention sinks, further scores that take part in the softmax but have no value: floats that broadcast to
            [batch, heads, q_len, 1]; None without them.
        mask_only: why the mask cannot be added to the scores as a bias if it is not recognised as a mask; "" if it can.
        mask_as_floats: what is added to the scores as a bias if the mask is not recognised; None if that is `mask`
            itself.
        factors: tensors by which query and key are multiplied.
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
    factors: Factors = NO_FACTORS


class Size(NamedTuple):
    """A node that asks for a size of a tensor: the product of the sizes of (view, dimension) pairs, and `more`."""

    node: Node
    parts: tuple[tuple[View, int], ...]
    more: int


@dataclass(frozen=True)
class Forward:
    """The forward of an attention.

    Attributes:
        node: the operator's call, erased after its replacement.  For decomposed attention, the node of the output.
        inputs: its operands.
        out, logsumexp: its results.  `logsumexp` is a `LogSumExp` if the program may read it too; None for the softmax
            of decomposed attention.
        draws: the nodes that draw random numbers for dropout; they are erased with the forward unless something else
            reads them.
        sizes: the sizes that the program asks of tensors that are erased with the forward.
        not_read: backwards of other forwards that take the random state of this one but do not use it, because they
            have no dropout; they are replaced first.
    """

    node: Node
    inputs: Inputs
    out: Sink
    logsumexp: Output | None
    draws: tuple[Node, ...] = ()
    sizes: tuple[Size, ...] = ()
    not_read: frozenset[Node] = frozenset()

    @property
    def order(self) -> Order | None:
        """The memory layout that the graph expects of the output, see `Sink.order`."""
        return self.out.order

    def given(self, backwards: Set[Node] = frozenset()) -> set[int | None]:
        """Return the indices of the forward's results that nodes other than `backwards` use.

        The set contains None if a node uses the operator's whole tuple of results.
        """
        return {
            user.args[1] if user.target is operator.getitem else None  # type: ignore[misc]
            for user in self.node.users
            if user.target is not operator.getitem or not _only_used_by(user, backwards)
        }


@dataclass(frozen=True)
class Gradient:
    """The gradient of the log-sum-exp that a backward takes as an argument.

    Attributes:
        argument: the argument that holds it, floats [batch, heads, length].
        factor: the number by which to multiply it to get the gradient with respect to the natural log-sum-exp.
    """

    argument: Argument
    factor: float = 1.0


class TensorGradient(Protocol):
    """The gradient of a tensor from which a bias is computed, as a function of the gradient of the bias."""

    @property
    def gradient(self) -> Node:
        """The graph's node of the tensor's gradient."""

    def put(self, emitter: Emitter, of_bias: Node, before: Node) -> tuple[Node, Node]:
        """Return (the node of the gradient in the graph, its replacement).

        Args:
            emitter: adds nodes.
            of_bias: the gradient of the bias, from which the replacement is computed.
            before: the node before which nodes are added.
        """


@dataclass(frozen=True)
class Backward:
    """The backward of an attention.

    Attributes:
        node: the operator's call, erased after its replacement.
        inputs: its operands.
        grad_out, out: the gradient of the output, and the output.  `out` is None if the backward does not read the
            output, so that only this package's forward computes what its backward needs.
        logsumexp: the argument that holds the log-sum-exp, fp32 [batch, heads, >= length], possibly with a trailing
            dimension of size 1; None if this package's backward can only read the log-sum-exp of its own forward.
        gradients: the sinks of the gradients of query, key and value.
        bias_gradient: the sink of the gradient of the mask; None if the call computes none.
        sink_gradient: the `Sink` of the gradient of the attention sinks, [batch, heads, q_len, 1]; None if the call
            computes none.
        random_state: the arguments that identify the random numbers that the forward drew for dropout.
        grad_logsumexp: the gradient of the log-sum-exp; None without one.
        merged: the forwards of the graph from whose results `out` and `logsumexp` are computed; empty if `out` and
            `logsumexp` are results of one forward, or come from elsewhere.
        tensor_gradients: a function that returns the gradients of tensors from which `inputs.bias` is computed, as far
            as the graph uses them.

            Raises:
                NotReadable: one of them cannot be computed from the gradient of the bias.
        factor_gradients: the same for the tensors from which `inputs.factors` are computed.

            Raises:
                NotReadable: one of them does not follow from the gradients of query and key.
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
    factor_gradients: Callable[[], tuple[FactorGradient, ...]] = tuple


def _none() -> None:
    return None


@dataclass(frozen=True)
class Attention:
    """An attention that may be replaced: a backward together with its forward, or a forward alone.

    Attributes:
        forward: the forward; None if it is in another graph.  Several backwards may share one forward.
        backward: the backward; None if the graph has none for this forward.
        forward_op: the name of the forward operator.
        refusal: called before anything else is read; returns why this call is not replaced, or None.  It may add a
            guard on a number.
        note: a remark of the frontend for the record.
        one_operator: whether forward and backward are one operator call each.  If not (decomposed attention),
            `forward_op` is a description such as "softmax by hand".
    """

    forward: Forward | None
    backward: Backward | None
    forward_op: str
    refusal: Callable[[], Fallback | None] = _none
    note: str = ""
    one_operator: bool = True

    @property
    def node(self) -> Node:
        """The node that names the attention in records: the backward or, without one, the forward."""
        found = self.backward or self.forward
        assert found is not None
        return found.node

    @property
    def inputs(self) -> Inputs:
        """The operands of the operator at `node`."""
        found = self.backward or self.forward
        assert found is not None
        return found.inputs

    @property
    def has_backward(self) -> bool:
        """Whether the graph has a backward of this attention."""
        return self.backward is not None

    @property
    def op(self) -> str:
        """The name of the operator at `node`, or `forward_op` if the attention consists of several nodes."""
        return op_name(self.node) if self.one_operator else self.forward_op

    @property
    def place(self) -> Node | None:
        """The node of the forward; None if the forward is not in this graph."""
        return None if self.forward is None else self.forward.node

    @property
    def tensors(self) -> Tensors | None:
        """The shapes, dtype and device of query, key and value, for the record."""
        views = self.inputs.query, self.inputs.key, self.inputs.value
        return tensors_of([view.node for view in views], views[0].axes)

    @property
    def lines(self) -> Iterable[Node]:
        """The nodes whose stack traces may tell which line of the model's source calls the attention."""
        return [self.node, *self.node.users]


@dataclass(frozen=True)
class Refusal:
    """An attention that was found but is certainly not replaced, with the reason.

    Attributes:
        node: the node whose name the attention has in records.
        op: the name of the operator.
        fallback: the reason.
        has_backward: whether it is a backward, or has one in the graph.
        tensors: the shapes, dtype and device of query, key and value; None if they are unknown.
        place: the node of the forward; None if it is unknown.
        everywhere: whether the reason is also given on devices on which no attention is replaced; if not, the device is
            the reason there.
        of_line: nodes whose stack traces may tell the line of the model's source; empty for `node` and its users.
    """

    node: Node
    op: str
    fallback: Fallback
    has_backward: bool
    tensors: Tensors | None
    place: Node | None = None
    everywhere: bool = False
    of_line: tuple[Node, ...] = ()

    @property
    def lines(self) -> Iterable[Node]:
        """The nodes whose stack traces may tell which line of the model's source calls the attention."""
        return self.of_line or [self.node, *self.node.users]


Found = Attention | Refusal


class Frontend(Protocol):
    """A function that finds the attentions of one origin, such as SDPA or flash-attn, in a graph."""

    def __call__(self, graph: Graph) -> Iterator[Found]:
        """Yield the attentions of a graph in the order of their nodes, without changing the graph or adding guards.

        Only reading the tensors of an attention may add nodes to the graph; these are temporary nodes
        (`graph.temporaries`).
        """


def is_alone(forward: Node, backwards: Set[str] = frozenset()) -> bool:
    """Return whether no backward operator reads a result of `forward`: neither this package's nor one of `backwards`.

    Args:
        forward: the call of a forward operator.
        backwards: the names of backward operators.
    """
    return not any(_leads_to(user, backwards) for user in forward.users)


def _leads_to(node: Node, backwards: Set[str]) -> bool:
    """Return whether `node` is a backward, or a result of a forward (or a view of one) that a backward reads."""
    if op_name(node) in backwards or op_name(node) == OURS:
        return True
    shows = node.target is operator.getitem or viewed(node) is not None
    return shows and any(_leads_to(user, backwards) for user in node.users)


def _is_result(node: Node, index: int) -> bool:
    return node.target is operator.getitem and bool(node.args[1] == index)


def _only_used_by(node: Node, allowed: Set[Node]) -> bool:
    return all(u in allowed or (is_alias(u) and _only_used_by(u, allowed)) for u in node.users)


def tensors_of(nodes: Iterable[object], axes: Axes = "bhsd") -> Tensors | None:
    """Return the shapes, dtype and device of query, key and value for a record; None if one is not a tensor.

    Args:
        nodes: the nodes of query, key and value.
        axes: the order of their dimensions; "bshd" is recorded as [batch, heads, length, head dim].
    """
    values = [node.meta.get("val") if isinstance(node, Node) else None for node in nodes]
    found = [value for value in values if isinstance(value, torch.Tensor)]
    if axes == "bshd":
        found = [heads_first(value, axes) for value in found if value.dim() == 4]
    if len(found) != 3:
        return None
    query, key, value = (tuple(map(sizes.static, tensor.shape)) for tensor in found)
    return Tensors(query, key, value, str(found[0].dtype).removeprefix("torch."), str(found[0].device))
