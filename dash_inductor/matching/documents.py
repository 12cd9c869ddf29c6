"""Documents of packed operators, as nodes of a graph: their numbers, and places where each begins with a tile.

Note [Tokens behind the last document]
The operators ask for documents that hold all tokens, and leave the output and the gradients of others uninitialised,
which under deterministic algorithms means NaN.  Here each such token is a document by itself: it sees its own key, so
that its output is its value, and no other token depends on it as long as it holds finite numbers.  To hide such keys
instead would have every query, key, value and gradient of an output cleaned in a pass over memory of its own (see
`data_masks`), for tokens that there should not be; one document of all of them would cost the square of their number.

Note [Aligned documents]
The tiles of the kernels begin at multiples of their size.  A document that begins elsewhere shares tiles with others,
and how its own sums are cut into tiles follows from where it begins.  With ``config.documents = "aligned"`` token t of
document d is moved to the row ``aligned[d] + t - starts[d]``, where ``aligned[d]`` is the sum of the lengths before it,
each rounded up to a multiple of `ALIGNMENT`, which every tile divides.  The kernels then run on rows, and results are
moved back.  No tile holds tokens of two documents, nor does a row block of a Hopper forward, whose tiles are several of
these, so that all that a document gets is what it gets alone.

There are ``tokens + ALIGNMENT * documents`` rows, as many as can be needed, which is known without the data.  A row
that no token has, behind a document or behind all, is a document of that row alone.  It holds a copy of the last token
of the document before it, or of the last token of all, so that nothing of another document comes into the tiles of one.
Its gradient of an output is a copy, too, and what it gets itself is left behind.  Tokens behind the last document have
the rows behind its own, from a multiple of `ALIGNMENT` on.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..model.mask import ALIGNMENT
from . import layout
from .emit import Emitter

aten, prims = torch.ops.aten, torch.ops.prims


@dataclass(frozen=True)
class Documents:
    """Where documents begin: document d has the tokens from ``starts[d]`` to ``starts[d + 1] - 1``.

    Args:
        starts: int32 or int64 [documents + 1], from 0 on in ascending order; equal neighbours make an empty document.
        aligned: whether the kernels get them where Note [Aligned documents] puts them.
    """

    starts: Node
    aligned: bool = False

    def rows(self, tokens: layout.Dim) -> layout.Dim:
        """The length of the sequence that the kernels get."""
        return tokens + ALIGNMENT * (self.starts.meta["val"].shape[0] - 1) if self.aligned else tokens

    def numbers(self, emitter: Emitter, tokens: int | Node, before: Node) -> Node:
        """A number for every row, the same for tokens of one document alone, in the type of the starts: [1, rows].

        All layers with the same starts share it.

        Args:
            before: a node of the forward that reads them.
        """
        call = _Shared(emitter, before)
        if self.aligned:
            return call(aten.unsqueeze.default, self.places(emitter, tokens, before).numbers, 0)
        positions = call.ramp(self.starts, tokens)
        counted = call.count(positions, self.starts)
        behind = call(aten.ge.Tensor, positions, call(aten.select.int, self.starts, 0, -1))
        numbers = call(aten.where.self, behind, call(aten.add.Tensor, counted, positions), counted)
        return call(aten.unsqueeze.default, numbers, 0)

    def places(self, emitter: Emitter, tokens: int | Node, before: Node) -> Places:
        """Of aligned documents; arguments as of `numbers`, and shared as that is."""
        call, starts = _Shared(emitter, before), self.starts
        # One number for each of the starts: where there are fewer, one document alone would be guarded.  The last start
        # is none of a document: it ends at 0, and no row behind it is inside.
        ends = call(aten.slice.Tensor, call(aten.constant_pad_nd.default, starts, [0, 1], 0), 0, 1)
        lengths = call(aten.sub.Tensor, ends, starts)
        rounded = call(aten.bitwise_and.Scalar, call(aten.add.Tensor, lengths, ALIGNMENT - 1), -ALIGNMENT)
        those_before = call(aten.slice.Tensor, call(aten.constant_pad_nd.default, rounded, [1, 0], 0), 0, 0, -1)
        aligned = call(aten.cumsum.default, those_before, 0, dtype=starts.meta["val"].dtype)

        ramp = call.ramp(starts, tokens)
        document = call(aten.sub.Tensor, call.count(ramp, starts), 1)
        moved = call(aten.index.Tensor, call(aten.sub.Tensor, aligned, starts), [document])
        row_of_token = call(aten.add.Tensor, ramp, moved)

        documents = emitter.size(starts, 0, before=before, like=before)
        padding = call.of_sizes(operator.mul, call.of_sizes(operator.sub, documents, 1), ALIGNMENT)
        rows = call.of_sizes(operator.add, tokens, padding)
        row = call.ramp(aligned, rows)
        document = call(aten.sub.Tensor, call.count(row, aligned), 1)
        end = call(aten.index.Tensor, ends, [document])
        begin = call(aten.index.Tensor, aligned, [document])
        token = call(aten.add.Tensor, call(aten.index.Tensor, starts, [document]), call(aten.sub.Tensor, row, begin))
        behind = call(aten.ge.Tensor, begin, call(aten.select.int, aligned, 0, -1))
        inside = call(aten.lt.Tensor, token, end)
        last = call(aten.where.self, behind, call(aten.select.int, ramp, 0, -1), call(aten.sub.Tensor, end, 1))
        token_of_row = call(aten.minimum.default, token, last)
        return Places(row_of_token, token_of_row, call(aten.where.self, inside, begin, row))


@dataclass(frozen=True)
class Places:
    """Where tokens lie in the sequence of Note [Aligned documents], in the type of the starts.

    Attributes:
        row_of_token: [tokens].
        token_of_row: [rows]; a copy of which token a row holds that no token has.
        numbers: [rows], of documents: the row with which one begins.
    """

    row_of_token: Node
    token_of_row: Node
    numbers: Node

    def to_rows(self, emitter: Emitter, node: Node, before: Node) -> Node:
        """[rows, ...] of [tokens, ...], contiguous."""
        return emitter.call(aten.index.Tensor, (node, [self.token_of_row]), before=before, like=before)

    def to_tokens(self, emitter: Emitter, node: Node, before: Node, like: Node) -> Node:
        """[tokens, heads, head dim] of [rows, heads, head dim], with metadata and strides of `like`.

        The dimensions of a dense `like` lie in memory as those of `node` do.
        """
        order = layout.dense_order(like.meta["val"].shape, like.meta["val"].stride())
        assert order is not None  # `analyse` and `cause_to_keep` looked at it
        place = order.index(0)

        def call(target: Any, *args: Any) -> Node:
            return emitter.call(target, args, before=before, like=like)

        if order != (0, 1, 2):
            node = call(aten.permute.default, node, list(order))
        node = call(aten.index.Tensor, node, [*[None] * place, self.row_of_token])
        return node if order == (0, 1, 2) else call(aten.permute.default, node, [order.index(d) for d in range(3)])


class _Shared:
    """Calls of operators that all layers share: they belong to no checkpointed region, whatever the layer does."""

    def __init__(self, emitter: Emitter, before: Node) -> None:
        self._emitter, self._before = emitter, before

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        known = len(self._emitter.created)
        node = self._emitter.shared(target, args, kwargs, before=self._before, like=self._before)
        return self._of_no_region(node, known)

    def count(self, positions: Node, boundaries: Node) -> Node:
        """How many of the ascending boundaries are not beyond each position."""
        is_int32 = boundaries.meta["val"].dtype == torch.int32
        return self(aten.bucketize.Tensor, positions, boundaries, out_int32=is_int32, right=True)

    def of_sizes(self, target: Callable[[Any, Any], Any], a: int | Node, b: int | Node) -> int | Node:
        """A number, or a node where one of the sizes is symbolic."""
        found: int | Node = self(target, a, b) if isinstance(a, Node) or isinstance(b, Node) else target(a, b)
        return found

    def ramp(self, boundaries: Node, length: int | Node) -> Node:
        """0, 1, ... in the type of the boundaries, behind these and in front of all that reads them."""
        value = boundaries.meta["val"]
        args = (length,)
        kwargs = {"start": 0, "step": 1, "dtype": value.dtype, "device": value.device, "requires_grad": False}
        for user in boundaries.users:
            source = user.args[0]
            if user.target is not aten.bucketize.Tensor or not isinstance(source, Node) or not user < self._before:
                continue
            if (source.target, source.args, source.kwargs) == (prims.iota.default, args, kwargs):
                return source
        known = len(self._emitter.created)
        place = max(boundaries, length) if isinstance(length, Node) else boundaries
        where = self._emitter.behind(place)
        node = self._emitter.call(prims.iota.default, args, kwargs, before=where, like=self._before)
        return self._of_no_region(node, known)

    def _of_no_region(self, node: Node, known: int) -> Node:
        for new in self._emitter.created[known:]:
            new.meta.pop("recompute", None)
            new.meta.pop("ac_graph_id", None)
        return node
