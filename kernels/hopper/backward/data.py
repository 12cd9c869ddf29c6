"""Checks the tensors of a mask that is data (not just a band), and makes the backward kernels' argument groups."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....errors import ArgumentError
from ....model.attention_spec import AttentionSpec
from ....model.mask import ROW_BLOCK
from ....schedule.table_tile_schedule import TILE_BITS, backward_words
from ....schedule.tile_schedule import ClosedForm
from ...common.call_launches import Address
from ...common.relations import layout
from ..shared.tensors import Places, check_data, taken
from . import arguments
from .build import WARPS


class BackwardData(NamedTuple):
    """The tensors that the mask reads, and its tables; `table_tile_schedule` describes how the kernels use them.

    Attributes:
        q_vectors, kv_vectors: int32 [batch, vectors, q_len] and [batch, vectors, kv_len], contiguous, such as segment
            ids, see `MaskTables`, or with kv ranges by head [tables, ...]; None if there are none, and under a dense
            mask.
        keys_seen: bool [batch, 1 or q_heads, kv_len], contiguous: whether some query sees the key.  It has q_heads
            entries if the mask differs between heads.
        visits: int32 [tables, n_kv], contiguous: the number of q tiles that each kv tile visits.
        steps: int32 [tables, n_kv, n_q], contiguous: their packed tile ids.
        contributions: int32 [tables, n_q], contiguous: the number of kv tiles that add to each q tile.
        seen_bits: int32 [tables, n_kv, n_q, words, threads], contiguous, the whole mask as bits, see Note [Seen bits]
            in `schedule.table_tile_schedule`; None without a dense mask.
        token_offsets, token_counts: int32 [row blocks], token offset and token count of each row block of a varlen
            layout, see `model.VarlenLayout`; lengths are then those of the padded rows.  None without a varlen layout.
    """

    q_vectors: Tensor | None
    kv_vectors: Tensor | None
    keys_seen: Tensor
    visits: Tensor
    steps: Tensor
    contributions: Tensor
    seen_bits: Tensor | None = None
    token_offsets: Tensor | None = None
    token_counts: Tensor | None = None

    @staticmethod
    def of(spec: AttentionSpec, extras: Sequence[Tensor]) -> BackwardData | None:
        """Returns the tensors of the mask from the operator's extras, or None if the mask is a band alone.

        Raises:
            ArgumentError: the number of extras is wrong.
        """
        places = BackwardData.places(spec, len(extras))
        return None if places is None else BackwardData(*taken(extras, places))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def places(spec: AttentionSpec, count: int) -> Places | None:
        """Returns, for each field, its tensor's index in the operator's extras, None for absent tensors.

        The result is None if the mask is a band alone.  The extras are the operands of the call, then the mask's
        vectors, if any, then its tables.  With a dense mask there are no vectors, and the mask's bits come last.

        Args:
            count: the number of extras.

        Raises:
            ArgumentError: the number of extras is wrong.
        """
        mask, operands = spec.mask, len(spec.operands)
        if not mask.operands:
            return None
        given, vectors, of_pairs = list(range(operands, count)), layout(spec.traits), spec.traits.of_pairs
        wanted = 5 if of_pairs else 4 + bool(vectors.QUERIES) + bool(vectors.KEYS)
        if len(given) != wanted:
            raise ArgumentError("extras", count, f"{operands} operands and {wanted} vectors and tables: {spec}")
        has_vectors = (False, False) if of_pairs else (vectors.QUERIES, vectors.KEYS)
        of_vectors = [given.pop(0) if some else None for some in has_vectors]
        varlen = mask.varlen_layout
        rows = (None, None) if varlen is None else (varlen.token_offset.index, varlen.token_count.index)
        return (*of_vectors, *given, *([] if of_pairs else [None]), *rows)


class Arguments(NamedTuple):
    """The strides with which the kernels read the tables of a mask that is data.

    Attributes:
        tables: by argument name, how many tables lie between two batch elements ("table_b") or query heads ("table_h").
    """

    tables: dict[str, int]

    @staticmethod
    def of(spec: AttentionSpec, data: BackwardData, tile_schedule: ClosedForm, device: torch.device) -> Arguments:
        """Checks the tensors of the mask and returns the strides of its tables.

        Args:
            tile_schedule: the tile schedule of the mask's band, over query heads.

        Raises:
            ArgumentError: a tensor is missing or not expected, or has another shape, layout, dtype or device.
        """
        p, of_pairs = tile_schedule.problem, spec.traits.of_pairs
        by_head = data.contributions is not None and len(data.contributions) == p.batch * p.heads
        table_b, table_h = (p.heads, 1) if by_head else (1, 0)
        tables = p.batch * table_b
        if tables * p.n_q * p.n_kv >= 1 << 31 or max(p.n_q, p.n_kv) > 1 << TILE_BITS:
            raise ArgumentError("tables, q tiles, kv tiles", (tables, p.n_q, p.n_kv), "fewer: a table has no room")
        vectors, varlen = layout(spec.traits), spec.traits.varlen
        numbers = 0 if of_pairs else tables * max(vectors.QUERIES * p.q_len, vectors.KEYS * p.kv_len)
        if numbers >= 1 << 31:
            raise ArgumentError("numbers of queries or keys", numbers, "fewer than 2**31: offsets have 32 bits")
        blocks = (p.q_len // ROW_BLOCK,)
        shapes = (
            (tables, vectors.QUERIES, p.q_len), (tables, vectors.KEYS, p.kv_len),
            (p.batch, p.heads if by_head else 1, p.kv_len), (tables, p.n_kv), (tables, p.n_kv, p.n_q), (tables, p.n_q),
            (tables, p.n_kv, p.n_q, *backward_words(p.block_q, p.block_kv, WARPS)), blocks, blocks,
        )  # fmt: skip
        given = bool(vectors.QUERIES) and not of_pairs, bool(vectors.KEYS) and not of_pairs
        needed = *given, True, True, True, True, of_pairs, varlen, varlen
        for name, tensor, shape, is_needed in zip(data._fields, data, shapes, needed, strict=True):
            if (tensor is not None) != is_needed:
                wanted = f"{'a tensor' if is_needed else None}, for the mask {spec.mask}"
                raise ArgumentError(f"data.{name}", tensor, wanted)
            if tensor is not None:
                check_data(name, tensor, shape, torch.bool if name == "keys_seen" else torch.int32, device)
        return Arguments({"table_b": table_b, "table_h": table_h})

    def of_call(self, places: Places, addresses: Mapping[int, Address]) -> dict[str, tuple[Any, ...] | None]:
        """Returns the mask's argument groups by name: "data", "contributions" and "varlen_layout".

        "data" is for the main kernel, "contributions" for `finish`; "varlen_layout" is for all kernels, None without a
        varlen layout.

        Args:
            places: for each field of `BackwardData`, its index in the operator's extras; None for absent tensors.
            addresses: the address of each extra, by index.
        """
        # the kernels read no absent tensor
        known = dict(zip(BackwardData._fields, (0 if i is None else addresses[i] for i in places), strict=True))
        data = arguments.DATA.values(
            visits=known["visits"], packed_tiles=known["steps"], q_vectors=known["q_vectors"],
            kv_vectors=known["kv_vectors"], keys_seen=known["keys_seen"], seen_bits=known["seen_bits"], **self.tables,
        )  # fmt: skip
        contributions = arguments.CONTRIBUTIONS.values(contributions=known["contributions"], **self.tables)
        varlen_layout = (known["token_offsets"], known["token_counts"]) if known["token_offsets"] else None
        return {"data": data, "contributions": contributions, "varlen_layout": varlen_layout}
