"""The tables of a mask that is data, as nodes of a graph, for kernels that walk by tables.

The tables are a node of their own (`dash_inductor::mask_tables`), which all layers with the same mask share.
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
    """Whether the kernels of a match walk by tables."""
    return family(match.plan.kernel).walks_by_tables and bool(match.site.mask.operands)


@dataclass(frozen=True)
class MaskTableNodes:
    """The tables of a site's mask, and what is made with them; see `build`.

    Args:
        traits: of the call.
    """

    emitter: Emitter
    tables: Node
    traits: Traits

    @staticmethod
    def build(emitter: Emitter, match: Match, extras: list[Node], before: Node) -> MaskTableNodes:
        """The tables of the mask of `match`, in front of `before`, or those that another layer has built already.

        Args:
            extras: the tensors that the call reads.  The mask's come first, and the tables are made of them alone:
                layers with the same mask share them, whatever else differs.
        """
        site, query, key = match.site, match.operands.query, match.operands.key

        def size(tensor: Node, dim: int) -> int | Node:
            """The size, the same one for all layers, so that their tables are the same."""
            return emitter.size(tensor, dim, before=before, like=extras[0])

        if site.mask.placed is None:
            facts = size(query.node, query.dim(2)), size(key.node, key.dim(2)), size(query.node, 0)
        else:  # in rows, which ids have
            facts = size(extras[0], 1), size(extras[0], 1), 1
        heads = site.q_heads, site.kv_heads
        arguments = (extras[: len(site.mask.operands)], *facts, *heads, str(site.mask), str(match.plan))
        tables = emitter.shared(mask_tables, arguments, {}, before=before, like=extras[0])
        return MaskTableNodes(emitter, tables, site.call.traits)

    def result(self, name: str, before: Node) -> Node:
        """A result of the operator, a field of `MaskTables`."""
        index = MaskTables._fields.index(name)
        return self.emitter.shared(operator.getitem, (self.tables, index), {}, before=before, like=self.tables)

    def of_forward(self, before: Node) -> list[Node]:
        """The operands that the forward reads behind the call's own tensors."""
        if self.traits.of_pairs:  # the bits say what vectors say, too
            return [self.result(name, before) for name in ("keys_seen", "counts", "row_steps", "seen_bits")]
        return self._all(("keys_seen", "counts", "row_steps"), before)

    def of_backward(self, before: Node) -> list[Node]:
        """The operands that the backward reads behind the call's own tensors."""
        return self._all(("keys_seen", "visits", "steps", "contributions"), before)

    def _all(self, names: tuple[str, ...], before: Node) -> list[Node]:
        vectors = layout(self.traits)
        given = [name for name, count in (("q_vectors", vectors.QUERIES), ("kv_vectors", vectors.KEYS)) if count]
        return [self.result(name, before) for name in (*given, *names)]
