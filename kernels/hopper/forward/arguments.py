"""The argument groups of the forward kernels, and their compile-time constants as named tuples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ...common.arguments import Group, integers
from ..shared import arguments as shared
from ..shared.operands import Parameter

if TYPE_CHECKING:
    from ...common.device.relations import form

PROBLEM = Group(
    integers("batch_heads", "q_heads", "group", "q_len", "kv_len", "lo", "hi", "head_chunk", "last_head_chunk")
    | {"scale_log2": "fp32"}
)
"""Sizes, the bounds of the band (anchored top left), the work list (`device.tile_work`), and the factor of scores.

group: query heads per kv head; scale_log2: see `score.factor`, above zero.
"""

DATA = Group(
    {"counts_ptr": "*i32", "steps_ptr": "*i32", "tables": "i32", "q_vectors": "*i32", "kv_vectors": "*i32"}
    | {"seen_bits_ptr": "*i32", "keys_seen_ptr": "*i8"}
)
"""The tensors of a mask that is data, see `data.ForwardData`; tables: tables per batch element, 1 or q_heads."""

ELEMENTS = Group({"ptr": "*i32"})
"""The batch elements whose tiles are listed, int32 [1 + batch]: their number, then their indices."""

DOCUMENTS = Group({"q_tiles_ptr": "*i32"})
"""The work list of documents, see `device.documents`."""

PADDING = Group(
    {"lse_ptr": "*fp32", "token_counts_ptr": "*i32"} | integers("heads", "rows"),
    {"token_counts_ptr": shared.ANY_ADDRESS},
)
"""The log-sum-exp of packed documents, [heads, rows], and the token counts of row blocks, for `device.prepare`."""

DROPOUT = shared.dropout(8)

SINKS = Group({"ptr": "*fp32"} | dict.fromkeys(("b", "h", "row"), "i64"), {"ptr": shared.ANY_ADDRESS})
"""Attention sinks, [batch, q_heads, q_len], and their strides, see `device.sinks`."""

OPERANDS = {"dropout": Parameter("dropout", DROPOUT), "sinks": Parameter("sinks", SINKS)}
"""The parameters of the main kernel that take optional operands."""


class Schedule(NamedTuple):
    """The functions generated for a schedule that the main kernel calls, as compile-time constants."""

    KV_RANGE: Any
    SEEN_ROWS: Any
    SEEN_KEYS: Any


class MaskKind(NamedTuple):
    """The kind of a mask, as compile-time constants.

    HAS_LO, HAS_HI: whether the band has this bound; EVEN_KV: every kv tile is full, without a ragged last one;
    FROM_THE_END: the last q tiles come first in the work list, see `schedule.table_tile_schedule`; HAS_DENSE: the
    kernel reads mask bits, see `data.ForwardData`; SEGMENT_IDS_AHEAD: see `device.listed.ListedMask`; HALF_TILES: see
    Note [Half tiles] in `device.half_tile`; HAS_RANGES: some form `is_range`; BY_HEAD: each query head has vectors of
    its own; READS_POSITIONS: some form reads the positions of the keys; FORMS, Q_ROWS, KV_ROWS, QUERIES, KEYS: see
    `common.relations.Layout`.
    """

    HAS_LO: bool
    HAS_HI: bool
    EVEN_KV: bool
    FROM_THE_END: bool
    HAS_DENSE: bool
    SEGMENT_IDS_AHEAD: int
    HALF_TILES: bool
    HAS_RANGES: bool
    BY_HEAD: bool
    READS_POSITIONS: bool
    FORMS: tuple[form.Form, ...]
    Q_ROWS: tuple[int, ...]
    KV_ROWS: tuple[int, ...]
    QUERIES: int
    KEYS: int


class Form(NamedTuple):
    """The tile sizes, rings and registers of the main kernel, as compile-time constants.

    BLOCK_D + TAIL_D: columns of tiles of q and k; BLOCK_DV: columns of tiles of v; Q_STAGES, STAGES: sizes of the rings
    of q, and of k and v; CONSUMERS: number of consumer warpgroups; OUT_IN_Q: out overwrites q in shared memory;
    REGISTERS, PRODUCER_REGISTERS: registers per thread of consumers and producer; FIXED_BASE: the softmax uses no row
    maximum, see Note [Softmax] in `device.steps`; SUMS_BY_MATMUL: see Note [Sums] in `device.sums`.
    """

    BLOCK_KV: int
    BLOCK_D: int
    TAIL_D: int
    BLOCK_DV: int
    Q_STAGES: int
    STAGES: int
    CONSUMERS: int
    OUT_IN_Q: bool
    REGISTERS: int
    PRODUCER_REGISTERS: int
    FIXED_BASE: bool
    SUMS_BY_MATMUL: bool


FEW_STRIDES = shared.strides(8)
"""Strides of q, k, v and out of `device.few`."""


class Few(NamedTuple):
    """The sizes of the split-KV kernels `device.few`, as compile-time constants.

    ROWS: query rows of a tile; BLOCK_KV: keys of a tile; DIM, VALUE_DIM: columns of q and k, and of v; BLOCK_D,
    BLOCK_DV: columns of their tiles.
    """

    ROWS: int
    BLOCK_KV: int
    DIM: int
    BLOCK_D: int
    VALUE_DIM: int
    BLOCK_DV: int
