"""The operators that turn the vectors of a mask into tables: `dash::mask_tables` and `dash::mask_rows`.

    mask_tables(extras, q_len, kv_len, heads, section, call, tiles) -> [base, visits, steps, contributions, tickets]
    mask_rows(extras, q_len, kv_len, call, tiles) -> [visits, steps, order]

The first is for a backward and the second for a forward; what the results hold is said in `kernels/mask_vectors`.  They
are nodes of their own in a graph, so that all layers that share a mask share its tables.  `extras` holds the tensors
that the call's mask names by their place; `call` and `tiles` are texts (`model.Call`, `model.Tiles`); `heads` and
`section` are those of `schedule.table_walk.Tables`.

Importing this module imports torch and defines the operators.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import ArgumentError
from .kernels.mask_vectors import Vectors
from .model.call import Call
from .model.plan import Tiles

_lib = torch.library.Library("dash", "FRAGMENT")
_lib.define(
    "mask_tables(Tensor[] extras, SymInt q_len, SymInt kv_len, SymInt heads, SymInt section, str call, str tiles) "
    "-> Tensor[]"
)
_lib.define("mask_rows(Tensor[] extras, SymInt q_len, SymInt kv_len, str call, str tiles) -> Tensor[]")

mask_tables = torch.ops.dash.mask_tables.default
mask_rows = torch.ops.dash.mask_rows.default


def _vectors(extras: Sequence[Tensor], q_len: int, kv_len: int, text: str) -> Vectors:
    """The vectors that the call's mask reads.

    Raises:
        ArgumentError: a mask that reads a tensor that is not there, or one that is no vector of keys.
    """
    mask = Call.parse(text).mask
    missing = [operand.index for operand in mask.operands if operand.index >= len(extras)]
    if missing:
        raise ArgumentError("extras", f"{len(extras)} tensors", f"more: the mask {mask} reads number {missing[0]}")
    if mask.keys is None or mask.operands != (mask.keys.valid,):
        raise ArgumentError("mask", str(mask), "a band and a vector of valid keys")
    return Vectors(mask.band, q_len, kv_len, extras[mask.keys.valid.index])


def _fake_tables(
    extras: list[Tensor], q_len: int, kv_len: int, heads: int, section: int, call: str, tiles: str
) -> list[Tensor]:
    batch, n_q, n_kv, like = _counts(extras, q_len, kv_len, call, tiles)
    shapes = (batch, n_kv), (batch, n_kv), (batch, n_q * n_kv), (batch, n_q), (batch * heads * n_kv,)
    return [like.new_empty(shape, dtype=torch.int32) for shape in shapes]


def _fake_rows(extras: list[Tensor], q_len: int, kv_len: int, call: str, tiles: str) -> list[Tensor]:
    batch, n_q, n_kv, like = _counts(extras, q_len, kv_len, call, tiles)
    return [like.new_empty(shape, dtype=torch.int32) for shape in ((batch, n_q), (batch, n_q * n_kv), (batch, n_q))]


def _counts(extras: Sequence[Tensor], q_len: int, kv_len: int, call: str, tiles: str) -> tuple[int, int, int, Tensor]:
    """Batch elements, q tiles, kv tiles, and a tensor on the results' device; numbers may be symbolic."""
    vectors, shape = _vectors(extras, q_len, kv_len, call), Tiles.parse(tiles)
    n_q = (q_len + shape.block_q - 1) // shape.block_q
    return vectors.batch, n_q, (kv_len + shape.block_kv - 1) // shape.block_kv, extras[0]


def _tables_on_cpu(
    extras: list[Tensor], q_len: int, kv_len: int, heads: int, section: int, call: str, tiles: str
) -> list[Tensor]:
    from .kernels.reference_tables import backward_tables

    shape = Tiles.parse(tiles)
    mask = _vectors(extras, q_len, kv_len, call)
    return [*backward_tables(mask, shape.block_q, shape.block_kv, heads, section)]


def _tables_on_cuda(
    extras: list[Tensor], q_len: int, kv_len: int, heads: int, section: int, call: str, tiles: str
) -> list[Tensor]:
    from .kernels.mask_tables import backward_tables

    shape = Tiles.parse(tiles)
    mask = _vectors(extras, q_len, kv_len, call)
    return [*backward_tables(mask, shape.block_q, shape.block_kv, heads, section)]


def _rows_on_cpu(extras: list[Tensor], q_len: int, kv_len: int, call: str, tiles: str) -> list[Tensor]:
    from .kernels.reference_tables import forward_tables

    shape = Tiles.parse(tiles)
    return [*forward_tables(_vectors(extras, q_len, kv_len, call), shape.block_q, shape.block_kv)]


def _rows_on_cuda(extras: list[Tensor], q_len: int, kv_len: int, call: str, tiles: str) -> list[Tensor]:
    from .kernels.mask_tables import forward_tables

    shape = Tiles.parse(tiles)
    return [*forward_tables(_vectors(extras, q_len, kv_len, call), shape.block_q, shape.block_kv)]


torch.library.register_fake("dash::mask_tables", _fake_tables, lib=_lib)
torch.library.register_fake("dash::mask_rows", _fake_rows, lib=_lib)
_lib.impl("mask_tables", _tables_on_cpu, "CPU")
_lib.impl("mask_tables", _tables_on_cuda, "CUDA")
_lib.impl("mask_rows", _rows_on_cpu, "CPU")
_lib.impl("mask_rows", _rows_on_cuda, "CUDA")
