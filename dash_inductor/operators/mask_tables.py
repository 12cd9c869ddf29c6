"""The operator that computes the tile tables of a data-dependent mask for Hopper kernels: `dash_inductor::mask_tables`.

    mask_tables(extras, q_len, kv_len, batch, q_heads, kv_heads, mask, plan, has_backward) -> Tensor[]

The results are the fields of `kernels.common.mask_data.MaskTables`, in order.  The operator is a separate graph node,
so that all layers with the same mask share its tables in forward and backward.  `extras` holds the tensors to which the
mask refers by index; `mask` and `plan` are texts (`model.Mask`, `model.Plan`).  q_len and kv_len are the lengths of the
mask, in padded rows for a packed mask (`model.VarlenLayout`).  Without a backward, what only that reads is empty.

Importing this module imports torch and defines the operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..kernels.common.mask_data import MaskData
from ..kernels.common.relations import Layout, vectors
from ..model.mask import ROW_BLOCK, Mask
from ..model.plan import Plan
from .direct import call_directly

if TYPE_CHECKING:
    from ..kernels.common.launch_list import Notes

_lib = torch.library.Library("dash_inductor", "FRAGMENT")
_lib.define(
    "mask_tables(Tensor[] extras, SymInt q_len, SymInt kv_len, SymInt batch, int q_heads, int kv_heads, str mask, "
    "str plan, bool has_backward) -> Tensor[]"
)

mask_tables = torch.ops.dash_inductor.mask_tables.default


def _data(
    extras: Sequence[Tensor], q_len: int, kv_len: int, batch: int, q_heads: int, kv_heads: int, mask: str, *_: object
) -> MaskData:
    return MaskData.of(Mask.parse(mask), extras, (batch, q_heads, kv_heads, q_len, kv_len))


def _fake(extras: list[Tensor], *arguments: Any) -> list[Tensor]:
    from ..schedule.table_tile_schedule import backward_words, seen_words

    *_, plan, has_backward = arguments
    data, parsed = _data(extras, *arguments), Plan.parse(plan)
    tiles = parsed.forward_tiles
    assert tiles is not None
    heads = data.q_heads if data.by_head else 1
    tables = data.batch * heads
    blocks = (data.q_len + ROW_BLOCK - 1) // ROW_BLOCK
    consumers = tiles.block_q // ROW_BLOCK
    q_tiles, row_kv = (blocks + consumers - 1) // consumers, (data.kv_len + tiles.block_kv - 1) // tiles.block_kv
    block_q, block_kv = parsed.dkdv.block_q, parsed.dkdv.block_kv
    n_q, n_kv = (data.q_len + block_q - 1) // block_q, (data.kv_len + block_kv - 1) // block_kv
    of_heads = data.of_heads()
    layout = Layout.of([of.form for of in vectors(of_heads)])
    of_tokens = [
        (of_heads.batch, count, length) if count else (0,)
        for count, length in ((layout.QUERIES, data.q_len), (layout.KEYS, data.kv_len))
    ]
    of_backward = [
        (tables, n_kv),
        (tables, n_kv, n_q),
        (tables, n_q),
        (0,) if data.dense is None else (tables, n_kv, n_q, *backward_words(block_q, block_kv, parsed.dkdv.num_warps)),
    ]
    tile_schedules = [
        (0,) if data.varlen else (tables, q_tiles),
        (0,) if data.varlen else (tables, q_tiles, row_kv),
        (0,) if data.dense is None else (tables, blocks, row_kv, 2 * ROW_BLOCK, seen_words(tiles.block_kv)),
        *(of_backward if has_backward else [(0,)] * len(of_backward)),
    ]
    new = extras[0].new_empty
    return [
        *(new(shape, dtype=torch.int32) for shape in of_tokens),
        new((data.batch, heads, data.kv_len), dtype=torch.bool),
        *(new(shape, dtype=torch.int32) for shape in tile_schedules),
    ]


def _on_cpu(extras: list[Tensor], *arguments: Any) -> list[Tensor]:
    from ..kernels.reference import tables as reference_tables

    *_, plan, has_backward = arguments
    return list(reference_tables.build(_data(extras, *arguments), Plan.parse(plan), has_backward))


def _on_cuda(extras: list[Tensor], *arguments: Any) -> list[Tensor]:
    from ..kernels.common import mask_tables as built

    def first(notes: Notes) -> Sequence[Tensor]:
        *_, plan, has_backward = arguments
        return built.build(_data(extras, *arguments), Plan.parse(plan), has_backward, notes)

    return built.CALLS.call(arguments, extras, first)


def _run(extras: list[Tensor], *arguments: Any) -> list[Tensor]:
    return (_on_cuda if extras[0].is_cuda else _on_cpu)(extras, *arguments)


torch.library.register_fake("dash_inductor::mask_tables", _fake, lib=_lib)
_lib.impl("mask_tables", _on_cpu, "CPU")
_lib.impl("mask_tables", _on_cuda, "CUDA")
call_directly(mask_tables, _run)
