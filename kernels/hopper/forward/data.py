"""The tensors of a mask that is data, as arguments of the Hopper forward."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ....errors import ArgumentError
from ....model.call import Call
from ....model.mask import ROW_BLOCK
from ...common.relations import layout
from ..shared.tensors import Places, taken


class ForwardData(NamedTuple):
    """The data that say which scores count, beside the band; see `listed` for what the tables hold.

    A query sees a key only if all relations show it; under a dense mask, if their bit is set.

    Args:
        q_vectors, kv_vectors: int32 [batch, vectors, q_len] and [batch, vectors, kv_len], contiguous, as of
            `MaskTables`; None without such vectors, and under a dense mask.
        keys_seen: bool [batch, tables of a batch element, kv_len], contiguous: the keys that a query sees.  Rows of v
            that are false here may hold anything.
        counts: int32 [tables, tiles of a head], contiguous: how many kv tiles the producer brings for a tile, >= 1.
        steps: int32 [tables, tiles of a head, kv tiles], contiguous: their packed tile ids in the order of the tile
            schedule.
        seen_bits: int32 [tables, row blocks, kv tiles, threads, words], contiguous, under a dense mask: all that the
            mask says, see Note [Seen bits] in `schedule.table_tile_schedule`.
        token_offsets, token_counts: token offset and token count of each row block of a varlen layout, see
            `model.VarlenLayout`; then lengths are the mask's.

    `tables` is the batch size, or that times the q heads where the dense mask differs from head to head.
    """

    q_vectors: Tensor | None
    kv_vectors: Tensor | None
    keys_seen: Tensor
    counts: Tensor
    steps: Tensor
    seen_bits: Tensor | None = None
    token_offsets: Tensor | None = None
    token_counts: Tensor | None = None

    @property
    def rows(self) -> int | None:
        """The number of padded rows of a varlen layout, None where tokens are rows."""
        return None if self.token_offsets is None else ROW_BLOCK * len(self.token_offsets)

    def addresses(self) -> tuple[int, ...]:
        """Returns the address of every tensor, 0 for absent ones."""
        return tuple(0 if t is None else t.data_ptr() for t in self)

    @staticmethod
    def of(call: Call, extras: Sequence[Tensor]) -> ForwardData | None:
        """Takes the tensors from the operator's extras, see `places`; returns None for a band alone.

        Raises:
            ArgumentError: the number of extras is wrong.
        """
        places = ForwardData.places(call, len(extras))
        return None if places is None else ForwardData(*taken(extras, places))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def places(call: Call, count: int) -> Places | None:
        """Returns, for each tensor, its index in the operator's extras.

        The extras are the operands of the call, then the mask's vectors, keys_seen, counts and steps.  With a dense
        mask there are no vectors, and the mask's bits come last.

        Raises:
            ArgumentError: the number of extras is wrong.
        """
        mask, operands = call.mask, len(call.operands)
        if not mask.operands:
            return None
        of_pairs, vectors, made = call.traits.of_pairs, layout(call.traits), list(range(operands, count))
        wanted = 4 if of_pairs else 3 + bool(vectors.QUERIES) + bool(vectors.KEYS)
        if len(made) != wanted:
            allowed = f"the {operands} operands of {call}, then {wanted} tensors made from them"
            raise ArgumentError("extras", f"{count} tensors", allowed)
        if of_pairs:
            return (None, None, *made, None, None)
        of_vectors = [made.pop(0) if some else None for some in (vectors.QUERIES, vectors.KEYS)]
        varlen = mask.varlen_layout
        rows = (None, None) if varlen is None else (varlen.token_offset.index, varlen.token_count.index)
        return (*of_vectors, *made, None, *rows)
