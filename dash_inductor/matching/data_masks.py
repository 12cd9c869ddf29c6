"""What kernels that walk by tables need of a mask that is data, as nodes of a graph: its tables, cleaned operands.

The tables are a node of their own (`dash::mask_tables`), which all layers with the same mask share.  The kernels
compute whole tiles, and zero times NaN is NaN.  So queries that see no key, keys that no query sees, and what belongs
to them are replaced by zeros before, whatever they hold; Inductor fuses that into the operations that produce them,
unless matmuls do.  Tokens of packed operators see themselves, and under a mask of valid keys alone no query needs it:
that is known when the graph is compiled (`everybody_takes_part`, `all_queries_are_alike`).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Node

from ..planning.families import family
from ..table_ops import mask_tables
from . import layout
from .emit import Emitter
from .sites import Match

aten = torch.ops.aten

Q_CODES, KV_CODES, ROWS_SEEING, KEYS_SEEN, COUNTS, ROW_STEPS, VISITS, STEPS, CONTRIBUTIONS, SEEN_BITS = range(10)
"""The results of `dash::mask_tables`."""


def needs_tables(match: Match) -> bool:
    """Whether the kernels of a match walk by tables."""
    return family(match.plan.kernel).walks_by_tables and bool(match.site.mask.operands)


def everybody_takes_part(match: Match) -> bool:
    """Whether every query sees a key and every key is seen, whatever the data are: query i sees key i.

    Of a mask of rows these are tokens: rows without one are nothing that the graph has.
    """
    mask, query, key = match.site.mask, match.operands.query, match.operands.key
    lo, hi = mask.band.lo, mask.band.hi
    return (
        mask.keys is None
        and mask.dense is None
        and (mask.segments is None or mask.placed is not None or mask.segments.q == mask.segments.kv)
        and layout.same(query.meta["val"].shape[2], key.meta["val"].shape[2])
        and (lo is None or lo <= 0)
        and (hi is None or hi >= 0)
    )


def all_queries_are_alike(match: Match) -> bool:
    """Whether all queries of a batch element see the same keys, whatever the data are: the valid ones, and no band.

    Then a query that sees no key is in a batch element without any visible tile pair, where nothing is multiplied.
    """
    mask = match.site.mask
    return mask.segments is None and mask.dense is None and mask.band.is_full


@dataclass(frozen=True)
class DataMask:
    """The tables of a site's mask, and what is made with them; see `build`.

    Args:
        has_codes, has_dense: the mask has valid keys or segments, and it has a dense mask.
        cleans_queries, cleans_keys: a visible tile pair may have queries that see no key, or keys that no query sees.
    """

    emitter: Emitter
    tables: Node
    has_codes: bool
    has_dense: bool
    cleans_queries: bool
    cleans_keys: bool

    @staticmethod
    def build(emitter: Emitter, match: Match, extras: list[Node], before: Node) -> DataMask:
        """The tables of the mask of `match`, in front of `before`, or those that another layer has built already.

        Args:
            extras: what the call reads.  That of the mask comes first, and the tables are of it alone: layers with the
                same mask share them, whatever else differs.
        """
        site, query, key = match.site, match.operands.query, match.operands.key

        def size(tensor: Node, dim: int) -> int | Node:
            """One for all layers, so that their tables are the same."""
            return emitter.size(tensor, dim, before=before, like=extras[0])

        lengths = size(query, 2), size(key, 2)
        if site.mask.placed is not None:  # in rows, which ids have
            rows = extras[0]
            lengths = size(rows, 1), size(rows, 1)
        facts = (*lengths, size(query, 0), site.q_heads, site.kv_heads)
        arguments = (extras[: len(site.mask.operands)], *facts, str(site.mask), str(match.plan))
        tables = emitter.shared(mask_tables, arguments, {}, before=before, like=extras[0])
        has_codes = site.mask.keys is not None or site.mask.segments is not None
        has_dense = site.mask.dense is not None
        cleans = not everybody_takes_part(match)
        cleans_queries = cleans and not all_queries_are_alike(match)
        return DataMask(emitter, tables, has_codes, has_dense, cleans_queries, cleans)

    def result(self, index: int, before: Node) -> Node:
        return self.emitter.shared(operator.getitem, (self.tables, index), {}, before=before, like=self.tables)

    def of_forward(self, before: Node) -> list[Node]:
        """What the forward reads behind the call's own tensors."""
        if self.has_dense:  # the bits say what codes say, too
            return [self.result(index, before) for index in (COUNTS, ROW_STEPS, SEEN_BITS)]
        return self._all((COUNTS, ROW_STEPS), before)

    def of_backward(self, before: Node) -> list[Node]:
        """What the backward reads behind the call's own tensors."""
        return self._all((VISITS, STEPS, CONTRIBUTIONS), before)

    def of_queries(self, tensor: Node, before: Node) -> Node:
        """[batch, q heads, q_len, ...], zero at queries that see no key, unless they never meet a key."""
        return self._only(tensor, ROWS_SEEING, before) if self.cleans_queries else tensor

    def of_keys(self, tensor: Node, before: Node) -> Node:
        """[batch, kv heads, kv_len, ...], zero at keys that no query sees."""
        return self._only(tensor, KEYS_SEEN, before) if self.cleans_keys else tensor

    def _all(self, indices: tuple[int, ...], before: Node) -> list[Node]:
        codes = (Q_CODES, KV_CODES) if self.has_codes else ()
        return [self.result(index, before) for index in (*codes, *indices)]

    def _only(self, tensor: Node, which: int, before: Node) -> Node:
        truths = self.result(which, before)
        call, value = self.emitter.call, tensor.meta["val"]
        truths = self.emitter.shared(aten.unsqueeze.default, (truths, -1), {}, before=before, like=truths)
        facts = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        zero = call(aten.full.default, ([], 0.0), facts, before=before, like=tensor)
        return call(aten.where.self, (truths, tensor, zero), before=before, like=tensor)
