"""Adds the tile tables of a data-dependent mask to a graph, for kernels that read their tile schedule from tables.

The tables (which tile pairs to visit, in which order) are computed on the device by one node,
`dash_inductor::mask_tables`, which all layers with the same mask share.  The forward of packed documents reads a work
list instead, the result of `dash_inductor::document_tiles`; that of a mask that may name documents reads both, see Note
[Documents of a mask] in `kernels.common.document_tiles`.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ...graph import sizes
from ...graph.emit import Emitter
from ...kernels.common.document_tiles import has_documents
from ...kernels.common.mask_data import MaskTables
from ...kernels.common.relations import layout
from ...kernels.families import family
from ...model.traits import Traits
from ...operators.document_tiles import document_tiles, document_tiles_of_mask
from ...operators.mask_tables import mask_tables
from ...upstream.dispatch import OpOverload
from .match import Match

aten = torch.ops.aten


def needs_tables(match: Match) -> bool:
    """Whether the kernels planned for an attention read tile tables: their family can, and the mask reads tensors."""
    return family(match.plan.kernel).tile_schedules_by_tables and bool(match.site.mask.operands)


@dataclass(frozen=True)
class MaskTableNodes:
    """The graph nodes that compute, at run time, the tile tables of an attention's mask: which tile pairs are visible.

    Made by `of`.  Nodes are inserted when a forward or a backward asks for them.

    Attributes:
        emitter: inserts the nodes.
        arguments: those of the `dash_inductor::mask_tables` node, whose outputs are the tables that kernels read.
        traits: the specialization key of the attention's kernels, which determines the tables that they read.
        documents: whether the forward computes documents by a work list where the mask names some.
    """

    emitter: Emitter
    arguments: tuple[Any, ...]
    traits: Traits
    documents: bool

    @staticmethod
    def of(emitter: Emitter, match: Match, extras: list[Node], before: Node, has_backward: bool) -> MaskTableNodes:
        """Returns the nodes for the mask of `match`; its lengths are inserted at once.

        Args:
            emitter: inserts the nodes.
            match: the attention.
            extras: the extra tensors of the attention's operators, those of the mask first.  The tables depend only on
                those of the mask, so layers with the same mask share them even if other extra tensors differ.
            before: the node before which lengths are inserted.
            has_backward: whether the attention has a backward in this graph.
        """
        site, query, key = match.site, match.operands.query, match.operands.key

        def size(tensor: Node, dim: int) -> int | Node:
            """The size of a dimension: a number, or one node for all uses, so that equal masks can share tables."""
            return emitter.size(tensor, dim, before=before, like=extras[0])

        if site.mask.varlen_layout is None:
            facts = size(query.node, query.dim(2)), size(key.node, key.dim(2)), size(query.node, 0)
        else:  # packed tokens: lengths in padded rows, which are the sizes of the segment ids
            facts = size(extras[0], 1), size(extras[0], 1), 1
        heads = site.q_heads, site.kv_heads
        arguments = (extras[: len(site.mask.operands)], *facts, *heads, str(site.mask), str(match.plan), has_backward)
        lengths = (of.node.meta["val"].shape[of.dim(2)] for of in (query, key))
        documents = has_documents(site.spec.of_forward) and sizes.same(*lengths)
        return MaskTableNodes(emitter, arguments, site.spec.traits, documents)

    def _call(self, target: OpOverload, arguments: tuple[Any, ...], before: Node) -> Node:
        """Returns the node of a call on the mask's tensors: that of an earlier layer with this mask, or a new one."""
        return self.emitter.shared(target, arguments, {}, before=before, like=self.arguments[0][0])

    def result(self, name: str, before: Node) -> Node:
        """Returns the node of one output of `mask_tables`, by its name in `MaskTables`; inserts it if necessary."""
        tables, index = self._call(mask_tables, self.arguments, before), MaskTables._fields.index(name)
        return self.emitter.shared(operator.getitem, (tables, index), {}, before=before, like=tables)

    def of_forward(self, before: Node) -> list[Node]:
        """Returns the nodes of the tables that the forward reads, which come last in its `extras`, in order."""
        if self.traits.varlen:
            operands, rows, *_, mask, plan, _ = self.arguments
            return [self._call(document_tiles, (operands, rows, mask, plan), before)]
        if self.traits.of_pairs:  # the bits per pair already include what the vectors say
            return [self.result(name, before) for name in ("keys_seen", "counts", "row_steps", "seen_bits")]
        tables = self._all(("keys_seen", "counts", "row_steps"), before)
        if not self.documents:
            return tables
        operands, *_, mask, plan, _ = self.arguments
        numbers = self.result("q_vectors", before) if self.traits.has("segments") else operands[0]
        tiles = self._call(document_tiles_of_mask, (numbers, mask, plan), before)
        results = [self.emitter.shared(operator.getitem, (tiles, i), {}, before=before, like=tiles) for i in range(2)]
        return tables + results

    def of_backward(self, before: Node) -> list[Node]:
        """Returns the nodes of the tables that the backward reads, which come last in its `extras`, in order."""
        tables = ("keys_seen", "visits", "steps", "contributions")
        if self.traits.of_pairs:
            return [self.result(name, before) for name in (*tables, "backward_bits")]
        return self._all(tables, before)

    def _all(self, names: tuple[str, ...], before: Node) -> list[Node]:
        vectors = layout(self.traits)
        given = [name for name, count in (("q_vectors", vectors.QUERIES), ("kv_vectors", vectors.KEYS)) if count]
        return [self.result(name, before) for name in (*given, *names)]
