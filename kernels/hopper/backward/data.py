"""Checks the tensors of a mask that is data (not just a band), and makes argument groups of the backward kernels from
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
from ....model.mask import ROW_BLOCK
from ....schedule.table_tile_schedule import TILE_BITS
from ....schedule.tile_schedule import ClosedForm
from ...common.call_launches import Address
from ...common.relations import layout
from ..shared.tensors import Places, broadcast_strides, check_data, taken
from . import arguments


class BackwardData(NamedTuple):
    """The tensors that the mask reads, and its tables; `table_tile_schedule` describes how the kernels use them.

    Attributes:
        q_vectors, kv_vectors: int32 [batch, vectors, q_len] and [batch, vectors, kv_len], contiguous, such as segment
            ids, see `MaskTables`; None if there are none.
        keys_seen: bool [batch, 1 or q_heads, kv_len], contiguous: whether some query sees the key.  It has q_heads
            entries if the dense mask differs between heads.
        visits: int32 [tables, n_kv], contiguous: the number of q tiles that each kv tile visits.
        steps: int32 [tables, n_kv, n_q], contiguous: their packed tile ids.
        contributions: int32 [tables, n_q], contiguous: the number of kv tiles that add to each q tile.
        dense: bool [batch, q_heads, q_len, kv_len], with size 1 in dimensions that broadcast; None without a dense
            mask.
        token_offsets, token_counts: int32 [row blocks], token offset and token count of each row block of a varlen
            layout, see `model.VarlenLayout`; lengths are then those of the padded rows.  None without a varlen layout.
    """

    q_vectors: Tensor | None
    kv_vectors: Tensor | None
    keys_seen: Tensor
    visits: Tensor
    steps: Tensor
    contributions: Tensor
    dense: Tensor | None = None
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
        vectors, if any, then its tables.

        Args:
            count: the number of extras.

        Raises:
            ArgumentError: the number of extras is wrong.
        """
        mask, operands = spec.mask, len(spec.operands)
        if not mask.operands:
            return None
        given, vectors = list(range(operands, count)), layout(spec.traits)
        wanted = 4 + bool(vectors.QUERIES) + bool(vectors.KEYS)
        if len(given) != wanted:
            raise ArgumentError("extras", count, f"{operands} operands and {wanted} vectors and tables: {spec}")
        of_vectors = [given.pop(0) if some else None for some in (vectors.QUERIES, vectors.KEYS)]
        pairs = [o.index for component in mask.others if component.RELATION.pairs for o in component.operands]
        (dense,) = pairs or (None,)
        varlen = mask.varlen_layout
        rows = (None, None) if varlen is None else (varlen.token_offset.index, varlen.token_count.index)
        return (*of_vectors, *given, dense, *rows)


class Arguments(NamedTuple):
    """The strides with which the kernels read a data-dependent mask: of its tables, and of a dense mask.

    Attributes:
        tables: by argument name, how many tables lie between two batch elements ("table_b") or query heads ("table_h").
        dense: by argument name, the strides of the dense mask in elements; 0 without one.
    """

    tables: dict[str, int]
    dense: dict[str, int]

    @staticmethod
    def of(spec: AttentionSpec, data: BackwardData, tile_schedule: ClosedForm, device: torch.device) -> Arguments:
        """Checks the tensors of the mask and returns the strides of its tables and of its dense mask.

        Args:
            tile_schedule: the tile schedule of the mask's band, over query heads.

        Raises:
            ArgumentError: a tensor is missing or not expected, or has another shape, layout, dtype or device.
        """
        p, dense = tile_schedule.problem, data.dense
        by_head = dense is not None and dense.ndim == 4 and dense.shape[1] != 1
        table_b, table_h = (p.heads, 1) if by_head else (1, 0)
        tables = p.batch * table_b
        if tables * p.n_q * p.n_kv >= 1 << 31 or max(p.n_q, p.n_kv) > 1 << TILE_BITS:
            raise ArgumentError("tables, q tiles, kv tiles", (tables, p.n_q, p.n_kv), "fewer: a table has no room")
        vectors, varlen = layout(spec.traits), spec.traits.varlen
        numbers = p.batch * max(vectors.QUERIES * p.q_len, vectors.KEYS * p.kv_len)
        if numbers >= 1 << 31:
            raise ArgumentError("numbers of queries or keys", numbers, "fewer than 2**31: offsets have 32 bits")
        blocks = (p.q_len // ROW_BLOCK,)
        shapes = (
            (p.batch, vectors.QUERIES, p.q_len), (p.batch, vectors.KEYS, p.kv_len),
            (p.batch, p.heads if by_head else 1, p.kv_len), (tables, p.n_kv), (tables, p.n_kv, p.n_q), (tables, p.n_q),
            (p.batch, p.heads, p.q_len, p.kv_len), blocks, blocks,
        )  # fmt: skip
        given = bool(vectors.QUERIES), bool(vectors.KEYS)
        needed = *given, True, True, True, True, spec.traits.of_pairs, varlen, varlen
        for name, tensor, shape, is_needed in zip(data._fields, data, shapes, needed, strict=True):
            if (tensor is not None) != is_needed:
                wanted = f"{'a tensor' if is_needed else None}, for the mask {spec.mask}"
                raise ArgumentError(f"data.{name}", tensor, wanted)
            if tensor is not None:
                dtype = torch.bool if name in ("keys_seen", "dense") else torch.int32
                check_data(name, tensor, shape, dtype, device, dense=name != "dense")
        strides = (0, 0, 0, 0) if dense is None else broadcast_strides(dense)
        named = dict(zip(("dense_b", "dense_h", "dense_i", "dense_j"), strides, strict=True))
        return Arguments({"table_b": table_b, "table_h": table_h}, named)

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
            kv_vectors=known["kv_vectors"], keys_seen=known["keys_seen"], dense=known["dense"], **self.tables,
            **self.dense,
        )  # fmt: skip
        contributions = arguments.CONTRIBUTIONS.values(contributions=known["contributions"], **self.tables)
        varlen_layout = (known["token_offsets"], known["token_counts"]) if known["token_offsets"] else None
        return {"data": data, "contributions": contributions, "varlen_layout": varlen_layout}
