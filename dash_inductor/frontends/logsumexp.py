"""Converts the log-sum-exp of this package's forward to the replaced operator's form, if the program reads it."""

from __future__ import annotations

import math
import operator
from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from ..graph import sizes
from ..graph.emit import Emitter
from ..masks.documents import Documents
from ..model.attention_spec import AttentionSpec
from ..model.mask import Band
from .attention import Forward, Gradient, Output

aten = torch.ops.aten

_NEVER_ALONE = (Band(), Band(0, None))
"""Bands under which every query sees a key, for all lengths."""


@dataclass(frozen=True)
class LogSumExp(Output):
    """The log-sum-exp that a forward operator of PyTorch or flash-attn returns, fp32; implements `Sink`.

    Its shape is [batch, heads, length], possibly padded to more rows or with a trailing dimension of size 1; [heads,
    tokens] for packed tokens.

    Attributes:
        base: the base of the logarithm.
        without_keys: the value for a query that sees no key; None if it is unknown.
        past_end: the value of the rows of padding.
        multiple: the length is padded to a multiple of this.
    """

    base: float = math.e
    without_keys: float | None = -math.inf
    past_end: float = math.inf
    multiple: int = 1

    def cause(self, query: Tensor, spec: AttentionSpec) -> str:
        """Return why this log-sum-exp cannot be computed from that of this package's forward; "" if it can.

        Args:
            query: [batch, heads, length, head dim].
            spec: the attention spec.
        """
        value: Tensor = self.node.meta["val"][self.index]
        length = query.shape[2]
        heads_first = [*query.shape[:2]]
        wanted = [[*heads_first, length], [*heads_first, length, 1]]
        if self.multiple > 1 and value.dim() == 3:
            padded = (length + self.multiple - 1) // self.multiple * self.multiple
            # The operator's fake expresses the padded length by other symbols.
            wanted.append([*heads_first, padded if sizes.differ(value.shape[2], padded) else value.shape[2]])
        if spec.mask.varlen_layout is not None:
            wanted = [[query.shape[1], length]]
        if value.dtype != torch.float32 or not any(sizes.same_all(value.shape, size) for size in wanted):
            return f"its log-sum-exp is {value.dtype} {tuple(value.shape)}, which is not read"
        if self.without_keys is None and _may_hide(spec):
            return "a query may see no key, and what its log-sum-exp is then is not known"
        return ""

    def made_of(
        self, emitter: Emitter, ours: Node, spec: AttentionSpec, query: Node, documents: Documents | None, before: Node
    ) -> Node:
        """Return a node before `before` that holds this log-sum-exp, computed from that of this package's forward.

        It is `ours` itself if both are equal.

        Args:
            emitter: adds nodes.
            ours: the log-sum-exp of this package's forward, see `operators.attention`.
            spec: the attention spec.
            query: the query of the call in the graph.
            documents: the documents of packed tokens; None if they are not packed.
            before: the node before which nodes are added.
        """
        like = ours

        def make(target: object, *args: object) -> Node:
            assert callable(target)
            return emitter.call(target, args, before=before, like=like)

        found = ours
        if spec.traits.biased:  # Note [Log-sum-exp in two parts]
            (batch, length), heads = (emitter.size(query, d, before=before, like=like) for d in (0, 2)), _heads(ours)
            parts = make(aten.view.default, ours, [batch, heads, 2, length])
            largest, excess = (make(aten.select.int, parts, 2, part) for part in (0, 1))
            found = make(aten.add.Tensor, largest, make(aten.mul.Tensor, excess, math.log(2)))
        if documents is not None:
            tokens = emitter.size(query, 0, before=before, like=like)
            rows = documents.rows_of_tokens(emitter, tokens, before)
            found = make(aten.squeeze.dim, make(aten.index.Tensor, found, [None, None, rows]), 0)
        if self.without_keys != -math.inf and _may_hide(spec):
            sees = make(aten.ne.Scalar, found, -math.inf)
            found = make(aten.where.ScalarOther, sees, found, self._in_natural_log(self.without_keys))
        if self.base != math.e:
            found = make(aten.mul.Tensor, found, 1.0 / math.log(self.base))
        return self._laid_out(emitter, found, before, like)

    def _in_natural_log(self, value: float | None) -> float:
        assert value is not None
        return value * math.log(self.base)

    def _laid_out(self, emitter: Emitter, found: Node, before: Node, like: Node) -> Node:
        """Return `found`, [batch, heads, length] or [heads, tokens], with the shape that the operator returned."""
        value, own = self.node.meta["val"][self.index], found.meta["val"]
        if value.dim() == own.dim() + 1:
            return emitter.call(aten.unsqueeze.default, (found, own.dim()), before=before, like=like)
        if sizes.same(value.shape[-1], own.shape[-1]):
            return found
        length = emitter.size(found, own.dim() - 1, before=before, like=like)
        rows: int | Node
        if isinstance(length, int):
            rows = -length % self.multiple
        else:
            negative = emitter.call(operator.neg, (length,), before=before, like=like)
            rows = emitter.call(operator.mod, (negative, self.multiple), before=before, like=like)
        return emitter.call(aten.constant_pad_nd.default, (found, [0, rows], self.past_end), before=before, like=like)


def gradient_of(emitter: Emitter, gradient: Gradient, logsumexp: Node, query: Node, before: Node) -> Node:
    """Return a node before `before` with the gradient of the natural log-sum-exp, for this package's backward; fp32.

    It is zero where a query sees no key, whatever the program computes from minus infinity there.

    Args:
        emitter: adds nodes.
        gradient: the gradient in the graph.
        logsumexp: the log-sum-exp that the backward reads, [batch, heads, >= length].
        query: the query of the call, [batch, heads, length, head dim].
        before: the node before which nodes are added.
    """
    given: Node = gradient.argument.value

    def make(target: object, *args: object) -> Node:
        assert callable(target)
        return emitter.call(target, args, before=before, like=given)

    length = emitter.size(query, 2, before=before, like=given)
    rows = make(aten.slice.Tensor, logsumexp, 2, 0, length)
    found = make(torch.ops.prims.convert_element_type.default, given, torch.float32)
    if gradient.factor != 1.0:
        found = make(aten.mul.Tensor, found, gradient.factor)
    return make(aten.where.ScalarSelf, make(aten.isinf.default, rows), 0.0, found)


def cause_of_results(forward: Forward, spec: AttentionSpec, backwards: Set[Node] = frozenset()) -> str:
    """Return why this package's forward cannot provide all results that the program reads; "" if it can.

    Args:
        forward: the forward in the graph.
        spec: the attention spec.
        backwards: nodes that do not count as readers of the results.
    """
    if not isinstance(forward.out, Output) or forward.logsumexp is None:  # the frontend has checked it
        return ""
    given = forward.given(backwards) - {forward.out.index}
    if given - {forward.logsumexp.index}:
        return "its random state or another result has other users"
    if not given:
        return ""
    if not isinstance(forward.logsumexp, LogSumExp):
        return "its log-sum-exp has other users"
    return forward.logsumexp.cause(forward.inputs.query.tensor, spec)


def _may_hide(spec: AttentionSpec) -> bool:
    """Return whether a query may see no key."""
    return spec.bias is not None or bool(spec.mask.operands) or spec.mask.band not in _NEVER_ALONE


def _heads(logsumexp: Node) -> int:
    found = sizes.static(logsumexp.meta["val"].shape[1])
    assert found is not None  # static: kernels are compiled for it
    return found
