"""Checks the tensors of a mask that is data (not just a band), and makes the forward kernel's argument groups."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....errors import ArgumentError
from ....model.attention_spec import AttentionSpec
from ....model.mask import ALIGNMENT, ROW_BLOCK
from ....schedule.document_tiles import WORDS, most_q_tiles
from ....schedule.table_tile_schedule import seen_words
from ....schedule.tile_schedule import Problem
from ...common.call_launches import Address
from ...common.document_tiles import has_documents
from ...common.relations import Layout, layout
from ..shared.tensors import Places, check_data, taken
from . import arguments
from .device.tile_work import ROWS


class ForwardData(NamedTuple):
    """The tensors that the forward kernel reads for a mask that is data, in addition to the band; see `listed`.

    A query sees a key only if all relations of the mask show it; under a dense mask, if the bit of the pair is set.
    `tables` is the batch size, or batch size times q heads if the mask differs between heads.

    Args:
        q_vectors, kv_vectors: int32 [tables, vectors, q_len] and [tables, vectors, kv_len], contiguous, such as segment
            ids, see `MaskTables`; None without vectors, and under a dense mask.
        keys_seen: bool [batch, tables / batch, kv_len], contiguous: whether some query sees the key.  Rows of v where
            it is false may hold anything.
        counts: int32 [tables, q tiles of a head], contiguous: how many kv tiles the producer loads for a q tile, >= 1.
        steps: int32 [tables, q tiles of a head, kv tiles], contiguous: their packed tile ids in the order of the tile
            schedule.
        seen_bits: int32 [tables, row blocks, kv tiles, threads, words], contiguous, the whole mask as bits, see Note
            [Seen bits] in `schedule.table_tile_schedule`; None without a dense mask.
        q_tiles: int32 [1 + q tiles at most, WORDS], contiguous: the work list of documents, see
            `common.document_tiles`; with packed documents lengths are those of the padded rows.  None without it.
        token_counts: int32 [row blocks], contiguous: the tokens of each row block of packed documents, see
            `model.VarlenLayout`.  None without them; with them, nothing but these two is read.
        elements: int32 [1 + batch], contiguous: how many batch elements are not in the work list of documents, and
            their indices.  None without segment ids that have such a list.
    """

    q_vectors: Tensor | None
    kv_vectors: Tensor | None
    keys_seen: Tensor | None
    counts: Tensor | None
    steps: Tensor | None
    seen_bits: Tensor | None = None
    q_tiles: Tensor | None = None
    token_counts: Tensor | None = None
    elements: Tensor | None = None

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
        Packed documents have one tensor, q_tiles.  Segment ids whose documents are listed have q_tiles and elements
        last (`common.document_tiles.has_documents`).

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
        made, documents = (made[:wanted], made[wanted:]) if has_documents(spec) else (made, [])
        if len(made) != wanted or len(documents) not in (0, 2):
            allowed = f"the {operands} operands of {spec}, then {wanted} tensors made from them"
            allowed += ", and two of documents or none" if has_documents(spec) else ""
            raise ArgumentError("extras", f"{count} tensors", allowed)
        if mask.varlen_layout is not None:
            return (None, None, None, None, None, None, *made, mask.varlen_layout.token_count.index, None)
        if of_pairs:
            return (None, None, *made, None, None, None)
        of_vectors = [made.pop(0) if some else None for some in (vectors.QUERIES, vectors.KEYS)]
        q_tiles, elements = documents or (None, None)
        return (*of_vectors, *made, None, q_tiles, None, elements)

    def check(self, work: Problem, layout: Layout, device: torch.device) -> int:
        """Checks the tensors and returns the number of tables per batch element, 1 or the number of q heads.

        Args:
            work: the lengths of the mask, the tiles, and all query heads.
            layout: the vectors that the kernel reads.

        Raises:
            ArgumentError: a tensor has another shape, layout, dtype or device, or there are too many kv tiles.
        """
        by_head = self.counts is not None and len(self.counts) == work.batch * work.heads
        tables = work.heads if by_head else 1
        if work.n_kv > 1 << 16:
            allowed = f"at most 2**16 tiles of {work.block_kv} keys where the mask is data"
            raise ArgumentError("key", (work.kv_len,), allowed)
        rows, row = (work.batch * tables, work.n_q), int(ROWS.value)
        shapes: Sequence[tuple[int, ...]] = (
            (rows[0], layout.QUERIES, work.q_len), (rows[0], layout.KEYS, work.kv_len),
            (work.batch, tables, work.kv_len), rows, (*rows, work.n_kv),
            (rows[0], -(-work.q_len // row), work.n_kv, 2 * row, seen_words(work.block_kv)),
            (1 + self._most_q_tiles(work), WORDS), (work.q_len // ROW_BLOCK,), (1 + work.batch,),
        )  # fmt: skip
        for name, tensor, shape in zip(self._fields, self, shapes, strict=True):
            if tensor is not None:
                check_data(name, tensor, shape, torch.bool if name == "keys_seen" else torch.int32, device)
        return tables

    def _most_q_tiles(self, work: Problem) -> int:
        """Returns how many q tiles the work list of documents has room for."""
        return work.q_len // ALIGNMENT if self.elements is None else most_q_tiles(work)

    @staticmethod
    def arguments(places: Places, tables: int, addresses: Mapping[int, Address]) -> dict[str, tuple[Any, ...] | None]:
        """Returns the argument groups "data", "documents" and "elements" by name, None for those without tensors.

        Args:
            places: for each field of `ForwardData`, its index in the operator's extras; None for absent tensors.
            tables: the number of tables per batch element, as `check` returns it.
            addresses: the address of each extra, by index.
        """
        # the kernel reads no absent tensor
        known = dict(zip(ForwardData._fields, (0 if i is None else addresses[i] for i in places), strict=True))
        found: dict[str, tuple[Any, ...] | None] = dict.fromkeys(("data", "documents", "elements"))
        given = {name for name, i in zip(ForwardData._fields, places, strict=True) if i is not None}
        if "q_tiles" in given:
            found["documents"] = arguments.DOCUMENTS.values(q_tiles_ptr=known["q_tiles"])
        if "elements" in given:
            found["elements"] = arguments.ELEMENTS.values(ptr=known["elements"])
        if "counts" not in given:
            return found
        found["data"] = arguments.DATA.values(
            counts_ptr=known["counts"], steps_ptr=known["steps"], tables=tables, q_vectors=known["q_vectors"],
            kv_vectors=known["kv_vectors"], seen_bits_ptr=known["seen_bits"], keys_seen_ptr=known["keys_seen"],
        )  # fmt: skip
        return found
