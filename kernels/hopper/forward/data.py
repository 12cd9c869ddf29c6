"""The tensors of a mask that is data, as arguments of the Hopper forward."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....errors import ArgumentError
from ....model.call import Call
from ....model.mask import ROW_BLOCK
from ....schedule.table_tile_schedule import seen_words
from ....schedule.tile_schedule import Problem
from ...common.call_launches import Address
from ...common.relations import Layout, layout
from ..shared.tensors import Places, check_data, taken
from . import arguments
from .device.tile_work import ROWS


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

    def check(self, work: Problem, layout: Layout, device: torch.device) -> int:
        """Checks the tensors and returns the number of tables per batch element.

        Args:
            work: the lengths of the mask, the tiles, and all query heads.
            layout: the vectors that the kernel reads.

        Raises:
            ArgumentError: a tensor has another shape, layout, dtype or device, or the tables have no room.
        """
        by_head = self.seen_bits is not None and self.counts.shape[:1] == (work.batch * work.heads,)
        tables = work.heads if by_head else 1
        if work.n_kv > 1 << 16:
            allowed = f"at most 2**16 tiles of {work.block_kv} keys where the mask is data"
            raise ArgumentError("key", (work.kv_len,), allowed)
        rows, row = (work.batch * tables, work.n_q), int(ROWS.value)
        blocks = (work.q_len // ROW_BLOCK,)
        shapes: Sequence[tuple[int, ...]] = (
            (work.batch, layout.QUERIES, work.q_len), (work.batch, layout.KEYS, work.kv_len),
            (work.batch, tables, work.kv_len), rows, (*rows, work.n_kv),
            (rows[0], -(-work.q_len // row), work.n_kv, 2 * row, seen_words(work.block_kv)), blocks, blocks,
        )  # fmt: skip
        for name, tensor, shape in zip(self._fields, self, shapes, strict=True):
            if tensor is not None:
                check_data(name, tensor, shape, torch.bool if name == "keys_seen" else torch.int32, device)
        return tables

    @staticmethod
    def arguments(places: Places, tables: int, addresses: Mapping[int, Address]) -> dict[str, tuple[Any, ...] | None]:
        """Returns the arguments `data` and `varlen_layout` of the main kernel.

        Args:
            places: as `places`.
            tables: as `check`.
            addresses: of the operator's extras, by index.
        """
        # the kernel reads no absent tensor
        known = dict(zip(ForwardData._fields, (0 if i is None else addresses[i] for i in places), strict=True))
        data = arguments.DATA.values(
            counts_ptr=known["counts"], steps_ptr=known["steps"], tables=tables, q_vectors=known["q_vectors"],
            kv_vectors=known["kv_vectors"], seen_bits_ptr=known["seen_bits"], keys_seen_ptr=known["keys_seen"],
        )  # fmt: skip
        return {
            "data": data,
            "varlen_layout": (known["token_offsets"], known["token_counts"]) if known["token_offsets"] else None,
        }
