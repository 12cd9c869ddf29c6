"""Converts the documents of varlen operators to segment ids and a layout in rows, as nodes of a graph.

Note [Rows of documents]
The tiles of the kernels begin at multiples of their size.  If a document began elsewhere, it would share tiles with
others, and the split of its own sums into tiles, and so their bits, would depend on where it begins.  So token t of
document d has the row ``begin[d] + t - starts[d]``, where ``begin[d]`` is the sum of the lengths before it, each
rounded up to a multiple of `ALIGNMENT`, which every tile size divides.  Kernels count in rows, and read and write
tokens where they are: `model.VarlenLayout` says which tokens the rows of a row block hold.  No tile holds tokens of two
documents, nor does a row block of a Hopper forward, whose tiles consist of several, so that a document's results are
the same as if it were computed alone.

The number of rows is the largest that this number of tokens and documents can need, which is known without the data.

Note [Tokens after the last document]
The operators require documents that contain all tokens.  They leave the output and the gradients of other tokens
uninitialised, which under deterministic algorithms means NaN.  Here tokens after the last document see no key and are
seen by no query: their output and gradients are zero.  Their rows begin at a multiple of `ALIGNMENT` and are
consecutive.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ..graph import sizes
from ..graph.emit import Emitter
from ..model.mask import ALIGNMENT, MAX_LENGTH, ROW_BLOCK

aten, prims = torch.ops.aten, torch.ops.prims

_NOBODY = MAX_LENGTH + 1
"""The segment id of a query that belongs to no document; no key has it."""


@dataclass(frozen=True)
class Documents:
    """The offsets of packed documents: document d has the tokens from ``starts[d]`` to ``starts[d + 1] - 1``.

    Args:
        starts: int32 or int64 [documents + 1] (``cu_seqlens``), ascending from 0; equal neighbours make an empty
            document.
    """

    starts: Node

    def rows(self, tokens: sizes.Dim) -> sizes.Dim:
        """Return an upper bound on the padded rows of the documents of this many tokens, a multiple of `ALIGNMENT`."""
        found: sizes.Dim = _tiles(tokens, self.starts.meta["val"].shape[0]) * ALIGNMENT
        return found

    def varlen_layout(self, emitter: Emitter, tokens: int | Node, before: Node) -> PackedOperands:
        """Return the operands of the packed mask, as nodes that all layers with equal `starts` share.

        They are the segment ids of the rows as queries and as keys, [1, rows], and the token offset and token count of
        each row block, int32, see `model.VarlenLayout`.

        Args:
            emitter: adds nodes.
            tokens: the number of tokens.
            before: a node of the forward that reads the result.
        """
        call, starts = _Shared(emitter, before), self.starts
        ends, begin, to_token = self._bounds(call, tokens)

        def of(rows: Node) -> tuple[Node, Node, Node]:
            """Return (document, token, tokens left) for the padded row numbers in `rows`, as three nodes of its shape.

            The document is that which owns the row.  Tokens left are those of the document from this token on; they
            are <= 0 if the row is padding.
            """
            document = call(aten.sub.Tensor, call.count(rows, begin), 1)
            token = call(aten.add.Tensor, rows, call(aten.index.Tensor, to_token, [document]))
            return document, token, call(aten.sub.Tensor, call(aten.index.Tensor, ends, [document]), token)

        tiles = call.tiles(tokens, emitter.size(starts, 0, before=before, like=before))
        row = call.ramp(begin, call.of_sizes(operator.mul, tiles, ALIGNMENT), 1)
        document, _, left = of(row)
        first = call(aten.index.Tensor, begin, [document])
        behind = call(aten.ge.Tensor, first, call(aten.select.int, begin, 0, -1))
        is_outside = call(aten.logical_or.default, behind, call(aten.le.Scalar, left, 0))
        keys = call(aten.where.self, is_outside, row, first)
        queries = call(aten.where.ScalarSelf, is_outside, _NOBODY, first)

        blocks = call.ramp(begin, call.of_sizes(operator.mul, tiles, ALIGNMENT // ROW_BLOCK), ROW_BLOCK)
        _, token, left = of(blocks)
        count = call(aten.clamp_max.default, call(aten.clamp_min.default, left, 0), ROW_BLOCK)
        facts = (call(prims.convert_element_type.default, node, torch.int32) for node in (token, count))
        return PackedOperands(call(aten.unsqueeze.default, queries, 0), call(aten.unsqueeze.default, keys, 0), *facts)

    def rows_of_tokens(self, emitter: Emitter, tokens: int | Node, before: Node) -> Node:
        """Return the row of each token: [tokens], in the dtype of the starts.

        Args:
            emitter: adds nodes.
            tokens: the number of tokens.
            before: a node of the forward that reads the result.
        """
        call, starts = _Shared(emitter, before), self.starts
        _, _, to_token = self._bounds(call, tokens)
        token = call.ramp(starts, tokens, 1)
        document = call(aten.sub.Tensor, call.count(token, starts), 1)
        row = call(aten.sub.Tensor, token, call(aten.index.Tensor, to_token, [document]))
        return call(aten.clamp_min.default, row, 0)  # tokens before the first document have none

    def _bounds(self, call: _Shared, tokens: int | Node) -> tuple[Node, Node, Node]:
        """Return each document's end, its first row, and what to add to its rows to get its tokens."""
        starts = self.starts
        dtype = starts.meta["val"].dtype
        # All vectors have one element per start: with one less, the case of one document would add a guard (size 1).
        # The last element stands for the tokens after the last document, which begin at the last start.
        ends = call(aten.slice.Tensor, call(aten.constant_pad_nd.default, starts, [0, 1], MAX_LENGTH), 0, 1)
        ends = call(aten.clamp_max.default, ends, tokens)
        lengths = call(aten.sub.Tensor, ends, starts)
        rounded = call(aten.bitwise_and.Scalar, call(aten.add.Tensor, lengths, ALIGNMENT - 1), -ALIGNMENT)
        those_before = call(aten.slice.Tensor, call(aten.constant_pad_nd.default, rounded, [1, 0], 0), 0, 0, -1)
        begin = call(aten.cumsum.default, those_before, 0, dtype=dtype)
        return ends, begin, call(aten.sub.Tensor, starts, begin)


class PackedOperands(NamedTuple):
    """The nodes of the operands of `model.Segments` for packed documents, in the order of its operands.

    Attributes:
        queries, keys: [1, rows], in the dtype of the starts: segment ids, equal only for tokens of the same document.
            as `model.VarlenLayout` defines them; those of keys ascend.
        token_offsets, token_counts: int32 [row blocks], as in `model.VarlenLayout`.
    """

    queries: Node
    keys: Node
    token_offsets: Node
    token_counts: Node


def _tiles(tokens: Any, starts: Any) -> Any:
    """Return how many multiples of `ALIGNMENT` hold all documents, each rounded up, and the tokens after the last."""
    return (tokens + starts * (ALIGNMENT - 1)) // ALIGNMENT


class _Shared:
    """Adds calls that all layers share; they belong to no checkpointed region, even if the layers do."""

    def __init__(self, emitter: Emitter, before: Node) -> None:
        self._emitter, self._before = emitter, before

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        known = len(self._emitter.created)
        node = self._emitter.shared(target, args, kwargs, before=self._before, like=self._before)
        return self._of_no_region(node, known)

    def count(self, positions: Node, boundaries: Node) -> Node:
        """Return, for each position, the number of boundaries that are at most this position; boundaries ascend."""
        is_int32 = boundaries.meta["val"].dtype == torch.int32
        return self(aten.bucketize.Tensor, positions, boundaries, out_int32=is_int32, right=True)

    def of_sizes(self, target: Callable[[Any, Any], Any], a: int | Node, b: int | Node) -> int | Node:
        """Return ``target(a, b)`` for sizes: a number if both are numbers, else a node."""
        found: int | Node = self(target, a, b) if isinstance(a, Node) or isinstance(b, Node) else target(a, b)
        return found

    def tiles(self, tokens: int | Node, starts: int | Node) -> int | Node:
        """Return how many blocks of `ALIGNMENT` rows hold all documents at most; both sizes may be numbers or nodes."""
        padded = self.of_sizes(operator.add, tokens, self.of_sizes(operator.mul, starts, ALIGNMENT - 1))
        return self.of_sizes(operator.floordiv, padded, ALIGNMENT)

    def ramp(self, boundaries: Node, length: int | Node, step: int) -> Node:
        """Return 0, step, 2 * step, ... in the dtype of the boundaries, placed after them and before every reader."""
        value = boundaries.meta["val"]
        args = (length,)
        kwargs = {"start": 0, "step": step, "dtype": value.dtype, "device": value.device, "requires_grad": False}
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
