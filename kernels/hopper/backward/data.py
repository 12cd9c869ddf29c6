"""Arguments of a backward launch whose mask is data."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....errors import ArgumentError
from ....model.call import Call
from ....model.mask import ROW_BLOCK
from ....schedule.table_tile_schedule import TILE_BITS
from ....schedule.tile_schedule import ClosedForm
from ...common.call_launches import Address
from ...common.relations import layout
from ...common.strides import dense_strides
from ..shared.tensors import Places, taken
from . import arguments

Described = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
DescribedData = tuple[Described | None, ...]
"""Shape, strides, dtype and device of every tensor of `BackwardData`, None for absent ones."""


class BackwardData(NamedTuple):
    """The tensors that the mask reads, and its tables; `table_tile_schedule` describes how the kernels use them.

    Attributes:
        q_vectors, kv_vectors: int32 [batch, vectors, q_len] and [batch, vectors, kv_len], contiguous, as in
            `MaskTables`; None if there are none.
        keys_seen: bool [batch, 1 or q_heads, kv_len], contiguous: whether some query sees the key.  It has q_heads
            entries if the dense mask differs between heads.
        visits, steps, contributions: int32 [tables, n_kv], [tables, n_kv, n_q] and [tables, n_q], contiguous.
        dense: bool [batch, q_heads, q_len, kv_len], with size 1 in dimensions that broadcast.
        token_offsets, token_counts: token offset and token count of each row block of a varlen layout, see
            `model.VarlenLayout`; lengths are then those of the padded rows.
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

    @property
    def rows(self) -> int | None:
        """The number of padded rows of a varlen layout, None where tokens are rows."""
        return None if self.token_offsets is None else ROW_BLOCK * len(self.token_offsets)

    @staticmethod
    def of(call: Call, extras: Sequence[Tensor]) -> BackwardData | None:
        """Takes the tensors from the operator's extras, see `places`; returns None for a band alone.

        Raises:
            ArgumentError: the number of extras is wrong.
        """
        places = BackwardData.places(call, len(extras))
        return None if places is None else BackwardData(*taken(extras, places))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def places(call: Call, count: int) -> Places | None:
        """Returns, for each tensor, its index in the operator's extras.

        The extras are the operands of the call, then the mask's vectors, if any, then its tables.

        Raises:
            ArgumentError: the number of extras is wrong.
        """
        mask, operands = call.mask, len(call.operands)
        if not mask.operands:
            return None
        given, vectors = list(range(operands, count)), layout(call.traits)
        wanted = 4 + bool(vectors.QUERIES) + bool(vectors.KEYS)
        if len(given) != wanted:
            raise ArgumentError("extras", count, f"{operands} operands and {wanted} vectors and tables: {call}")
        of_vectors = [given.pop(0) if some else None for some in (vectors.QUERIES, vectors.KEYS)]
        pairs = [o.index for component in mask.others if component.RELATION.pairs for o in component.operands]
        (dense,) = pairs or (None,)
        varlen = mask.varlen_layout
        rows = (None, None) if varlen is None else (varlen.token_offset.index, varlen.token_count.index)
        return (*of_vectors, *given, dense, *rows)

    def addresses(self) -> tuple[int, ...]:
        """Returns the address of every tensor, 0 for absent ones."""
        return tuple(0 if t is None else t.data_ptr() for t in self)

    def described(self) -> DescribedData:
        """Returns the facts that a cached launch depends on."""
        return tuple(None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in self)


class Arguments(NamedTuple):
    """The arguments of a mask that is data, other than addresses.

    Attributes:
        tables: strides of tables, by argument name.
        dense: strides of the dense mask, by argument name.
    """

    tables: dict[str, int]
    dense: dict[str, int]

    @staticmethod
    def of(call: Call, facts: DescribedData, tile_schedule: ClosedForm, device: torch.device) -> Arguments:
        """Checks the tensors and returns their arguments.

        Args:
            tile_schedule: the tile schedule of the mask's band, over query heads.

        Raises:
            ArgumentError: a tensor is missing or not expected, or has another shape, layout, dtype or device.
        """
        p, dense = tile_schedule.problem, facts[BackwardData._fields.index("dense")]
        if dense is not None:
            _check("data.dense", dense, (p.batch, p.heads, p.q_len, p.kv_len), True, device, torch.bool)
        by_head = dense is not None and dense[0][1] != 1
        table_b, table_h = (p.heads, 1) if by_head else (1, 0)
        tables = p.batch * table_b
        if tables * p.n_q * p.n_kv >= 1 << 31 or max(p.n_q, p.n_kv) > 1 << TILE_BITS:
            raise ArgumentError("tables, q tiles, kv tiles", (tables, p.n_q, p.n_kv), "fewer: a table has no room")
        vectors, varlen = layout(call.traits), call.traits.varlen
        numbers = p.batch * max(vectors.QUERIES * p.q_len, vectors.KEYS * p.kv_len)
        if numbers >= 1 << 31:
            raise ArgumentError("numbers of queries or keys", numbers, "fewer than 2**31: offsets have 32 bits")
        shapes = (
            (p.batch, vectors.QUERIES, p.q_len),
            (p.batch, vectors.KEYS, p.kv_len),
            (p.batch, p.heads if by_head else 1, p.kv_len),
            (tables, p.n_kv),
            (tables, p.n_kv, p.n_q),
            (tables, p.n_q),
            None,
            (p.q_len // ROW_BLOCK,),
            (p.q_len // ROW_BLOCK,),
        )
        given = bool(vectors.QUERIES), bool(vectors.KEYS)
        needed = *given, True, True, True, True, call.traits.of_pairs, varlen, varlen
        for name, fact, shape, is_needed in zip(BackwardData._fields, facts, shapes, needed, strict=True):
            if (fact is not None) != is_needed:
                raise ArgumentError(
                    f"data.{name}", fact, f"{'a tensor' if is_needed else None}, for the mask {call.mask}"
                )
            if fact is not None and shape is not None:
                dtype = torch.bool if name == "keys_seen" else torch.int32
                _check(f"data.{name}", fact, shape, False, device, dtype)
        strides: Sequence[int] = (0, 0, 0, 0)
        if dense is not None:
            strides = [0 if size == 1 else stride for size, stride in zip(*dense[:2], strict=True)]
        named = dict(zip(("dense_b", "dense_h", "dense_i", "dense_j"), strides, strict=True))
        return Arguments({"table_b": table_b, "table_h": table_h}, named)

    def of_call(self, addresses: Sequence[Address]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns the groups `DATA` of the main kernel and `CONTRIBUTIONS` of `finish`, for
        `BackwardData.addresses`.
        """
        q_vectors, kv_vectors, keys_seen, visits, steps, contributions, dense, *_of_rows = addresses
        main = arguments.DATA.values(
            visits=visits, packed_tiles=steps, q_vectors=q_vectors, kv_vectors=kv_vectors, keys_seen=keys_seen,
            dense=dense, **self.tables, **self.dense,
        )  # fmt: skip
        return main, arguments.CONTRIBUTIONS.values(contributions=contributions, **self.tables)


def _check(
    name: str, fact: Described, full: tuple[int, ...], broadcasts: bool, device: torch.device, allowed: torch.dtype
) -> None:
    """Raises ArgumentError unless a tensor has the expected shape, dtype and device and is contiguous or
    `broadcasts`.
    """
    shape, strides, dtype, where = fact
    if where != device:
        raise ArgumentError(f"{name}.device", str(where), str(device))
    if dtype != allowed:
        raise ArgumentError(f"{name}.dtype", dtype, str(allowed))
    sizes = tuple(1 if broadcasts and size == 1 else wanted for size, wanted in zip(shape, full, strict=False))
    if len(shape) != len(full) or shape != sizes:
        raise ArgumentError(f"{name}.shape", tuple(shape), f"{full}{', or 1' if broadcasts else ''}")
    contiguous = dense_strides(shape, range(len(shape)))
    if not broadcasts and any(size > 1 and a != b for size, a, b in zip(shape, strides, contiguous, strict=True)):
        raise ArgumentError(f"{name}.stride()", strides, "those of a contiguous tensor")
