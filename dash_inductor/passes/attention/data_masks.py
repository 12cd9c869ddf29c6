"""Adds the tile tables of a data-dependent mask to a graph, for kernels that read their tile schedule from tables.

The tables (which tile pairs to visit, in which order) are computed on the device by one node,
`dash_inductor::mask_tables`, which all layers with the same mask share.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Node

from ...graph.emit import Emitter
from ...kernels.common.mask_data import MaskTables
from ...kernels.common.relations import layout
from ...kernels.families import family
from ...model.traits import Traits
from ...operators.mask_tables import mask_tables
from .match import Match

aten = torch.ops.aten


def needs_tables(match: Match) -> bool:
    """Whether the kernels planned for an attention read tile tables: their family can, and the mask reads tensors."""
    return family(match.plan.kernel).tile_schedules_by_tables and bool(match.site.mask.operands)


@dataclass(frozen=True)
class MaskTableNodes:
    """The graph node that computes, at run time, the tile tables of an attention's mask: which tile pairs are visible.

    Made by `build`.

    Attributes:
        emitter: inserts the nodes that select one of the tables.
        tables: the `dash_inductor::mask_tables` node, whose outputs are the tables that kernels read.
        traits: the specialization key of the attention's kernels, which determines the tables that they read.
    """

    emitter: Emitter
    tables: Node
    traits: Traits

    @staticmethod
    def build(emitter: Emitter, match: Match, extras: list[Node], before: Node) -> MaskTableNodes:
        """Inserts the node that computes the tables of `match`'s mask, or finds that of an earlier layer.

        Args:
            emitter: inserts the nodes.
            match: the attention.
            extras: the extra tensors of the attention's operators, those of the mask first.  The tables depend only on
                those of the mask, so layers with the same mask share them even if other extra tensors differ.
            before: the node before which the new node is inserted.
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
        arguments = (extras[: len(site.mask.operands)], *facts, *heads, str(site.mask), str(match.plan))
        tables = emitter.shared(mask_tables, arguments, {}, before=before, like=extras[0])
        return MaskTableNodes(emitter, tables, site.spec.traits)

    def result(self, name: str, before: Node) -> Node:
        """Returns the node of one output of `mask_tables`, by its name in `MaskTables`; inserts it if necessary."""
        index = MaskTables._fields.index(name)
        return self.emitter.shared(operator.getitem, (self.tables, index), {}, before=before, like=self.tables)

    def of_forward(self, before: Node) -> list[Node]:
        """Returns the nodes of the tables that the forward reads, which come last in its `extras`, in order."""
        if self.traits.varlen:
            return [self.result("q_tiles", before)]
        if self.traits.of_pairs:  # the bits per pair already include what the vectors say
            return [self.result(name, before) for name in ("keys_seen", "counts", "row_steps", "seen_bits")]
        return self._all(("keys_seen", "counts", "row_steps"), before)

    def of_backward(self, before: Node) -> list[Node]:
        """Returns the nodes of the tables that the backward reads, which come last in its `extras`, in order."""
        return self._all(("keys_seen", "visits", "steps", "contributions"), before)

    def _all(self, names: tuple[str, ...], before: Node) -> list[Node]:
        vectors = layout(self.traits)
        given = [name for name, count in (("q_vectors", vectors.QUERIES), ("kv_vectors", vectors.KEYS)) if count]
        return [self.result(name, before) for name in (*given, *names)]
