"""Checks the tensors of a mask that is data (not just a band), and makes argument groups of the forward kernel from
them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....errors import ArgumentError
from ....model.attention_spec import AttentionSpec
from ....model.mask import ALIGNMENT, ROW_BLOCK
from ....schedule.document_tiles import WORDS
from ....schedule.table_tile_schedule import seen_words
from ....schedule.tile_schedule import Problem
from ...common.call_launches import Address
from ...common.relations import Layout, layout
from ..shared.tensors import Places, check_data, taken
from . import arguments
from .device.tile_work import ROWS


class ForwardData(NamedTuple):
    """The tensors that the forward kernel reads for a mask that is data, in addition to the band; see `listed`.

    A query sees a key only if all relations of the mask show it; under a dense mask, if the bit of the pair is set.
    `tables` is the batch size, or batch size times q heads if the dense mask differs between heads.

    Args:
        q_vectors, kv_vectors: int32 [batch, vectors, q_len] and [batch, vectors, kv_len], contiguous, such as segment
            ids, see `MaskTables`; None without vectors, and under a dense mask.
        keys_seen: bool [batch, tables / batch, kv_len], contiguous: whether some query sees the key.  Rows of v where
            it is false may hold anything.
        counts: int32 [tables, q tiles of a head], contiguous: how many kv tiles the producer loads for a q tile, >= 1.
        steps: int32 [tables, q tiles of a head, kv tiles], contiguous: their packed tile ids in the order of the tile
            schedule.
        seen_bits: int32 [tables, row blocks, kv tiles, threads, words], contiguous, the whole mask as bits, see Note
            [Seen bits] in `schedule.table_tile_schedule`; None without a dense mask.
        q_tiles: int32 [1 + q tiles at most, 4], contiguous: the work list of packed documents, see
            `MaskTables.q_tiles`; lengths are then those of the padded rows.  None without them.
        token_counts: int32 [row blocks], contiguous: the tokens of each row block of packed documents, see
            `model.VarlenLayout`.  None without them; with them, nothing but these two is read.
    """

    q_vectors: Tensor | None
    kv_vectors: Tensor | None
    keys_seen: Tensor | None
    counts: Tensor | None
    steps: Tensor | None
    seen_bits: Tensor | None = None
    q_tiles: Tensor | None = None
    token_counts: Tensor | None = None

    @staticmethod
    def of(spec: AttentionSpec, extras: Sequence[Tensor]) -> ForwardData | None:
        """Returns the tensors of the mask from the operator's extras, or None if the mask is a band alone.

        Raises:
            ArgumentError: the number of extras is wrong.
        """
        places = ForwardData.places(spec, len(extras))
        return None if places is None else ForwardData(*taken(extras, places))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def places(spec: AttentionSpec, count: int) -> Places | None:
        """Returns, for each field, its tensor's index in the operator's extras, None for absent tensors.

        The result is None if the mask is a band alone.  The extras are the operands of the call, then the mask's
        vectors, keys_seen, counts and steps.  With a dense mask there are no vectors, and the mask's bits come last.
        Packed documents have one tensor, q_tiles.

        Args:
            count: the number of extras.

        Raises:
            ArgumentError: the number of extras is wrong.
        """
        mask, operands = spec.mask, len(spec.operands)
        if not mask.operands:
            return None
        of_pairs, vectors, made = spec.traits.of_pairs, layout(spec.traits), list(range(operands, count))
        wanted = 1 if spec.traits.varlen else 4 if of_pairs else 3 + bool(vectors.QUERIES) + bool(vectors.KEYS)
        if len(made) != wanted:
            allowed = f"the {operands} operands of {spec}, then {wanted} tensors made from them"
            raise ArgumentError("extras", f"{count} tensors", allowed)
        if mask.varlen_layout is not None:
            return (None, None, None, None, None, None, *made, mask.varlen_layout.token_count.index)
        if of_pairs:
            return (None, None, *made, None, None)
        of_vectors = [made.pop(0) if some else None for some in (vectors.QUERIES, vectors.KEYS)]
        return (*of_vectors, *made, None, None, None)

    def check(self, work: Problem, layout: Layout, device: torch.device) -> int:
        """Checks the tensors and returns the number of tables per batch element, 1 or the number of q heads.

        Args:
            work: the lengths of the mask, the tiles, and all query heads.
            layout: the vectors that the kernel reads.

        Raises:
            ArgumentError: a tensor has another shape, layout, dtype or device, or there are too many kv tiles.
        """
        by_head = self.seen_bits is not None and self.counts is not None and len(self.counts) == work.batch * work.heads
        tables = work.heads if by_head else 1
        if work.n_kv > 1 << 16:
            allowed = f"at most 2**16 tiles of {work.block_kv} keys where the mask is data"
            raise ArgumentError("key", (work.kv_len,), allowed)
        rows, row = (work.batch * tables, work.n_q), int(ROWS.value)
        shapes: Sequence[tuple[int, ...]] = (
            (work.batch, layout.QUERIES, work.q_len), (work.batch, layout.KEYS, work.kv_len),
            (work.batch, tables, work.kv_len), rows, (*rows, work.n_kv),
            (rows[0], -(-work.q_len // row), work.n_kv, 2 * row, seen_words(work.block_kv)),
            (1 + work.q_len // ALIGNMENT, WORDS), (work.q_len // ROW_BLOCK,),
        )  # fmt: skip
        for name, tensor, shape in zip(self._fields, self, shapes, strict=True):
            if tensor is not None:
                check_data(name, tensor, shape, torch.bool if name == "keys_seen" else torch.int32, device)
        return tables

    @staticmethod
    def arguments(places: Places, tables: int, addresses: Mapping[int, Address]) -> dict[str, tuple[Any, ...] | None]:
        """Returns the main kernel's argument groups "data" and "documents" by name; one of them is None.

        Args:
            places: for each field of `ForwardData`, its index in the operator's extras; None for absent tensors.
            tables: the number of tables per batch element, as `check` returns it.
            addresses: the address of each extra, by index.
        """
        # the kernel reads no absent tensor
        known = dict(zip(ForwardData._fields, (0 if i is None else addresses[i] for i in places), strict=True))
        if places[ForwardData._fields.index("q_tiles")] is not None:
            return {"data": None, "documents": arguments.DOCUMENTS.values(q_tiles_ptr=known["q_tiles"])}
        data = arguments.DATA.values(
            counts_ptr=known["counts"], steps_ptr=known["steps"], tables=tables, q_vectors=known["q_vectors"],
            kv_vectors=known["kv_vectors"], seen_bits_ptr=known["seen_bits"], keys_seen_ptr=known["keys_seen"],
        )  # fmt: skip
        return {"data": data, "documents": None}
