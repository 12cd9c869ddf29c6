"""The argument groups of the backward kernels, and their compile-time constants as named tuples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ...common.arguments import Group, integers
from ..shared import arguments as shared
from ..shared.arguments import ANY_ADDRESS
from ..shared.operands import Parameter

if TYPE_CHECKING:
    from ...common.device.relations import form

WORKSPACE = Group({"semaphores": "*i32", "work_id_ptr": "*i32", "group_sums": "*fp32", "group_semaphores": "*i32"})
"""Workspace that CTAs share; all of it but group_sums is zeroed.

semaphores: int32 [batch * q_heads * n_q]; work_id_ptr: int32 [1].  Where kv heads have several query heads, see
`device.group`, group_sums: fp32 [batch * kv_heads * n_kv, BLOCK_KV * (D + TAIL_D + DV)]; group_semaphores: int32
[batch * kv_heads * n_kv].
"""

PROBLEM = Group(
    integers("work_ids", "batch", "q_heads", "q_len", "kv_len", "lo", "hi", "head_chunk")
    | {"scale": "fp32", "scale_log2": "fp32"}
)
"""Sizes, the bounds of the band (anchored top left), the scale, and scale_log2 (see `score.factor`).

work_ids: the number of work ids, independent of the number of CTAs, see `device.work_ids`; head_chunk: the size of a
head chunk of the launch order.
"""

_POINTERS = ("visits", "packed_tiles", "q_vectors", "kv_vectors", "keys_seen", "seen_bits")
_TABLES = integers("table_b", "table_h")
DATA = Group(dict.fromkeys(_POINTERS, "*i32") | {"keys_seen": "*i8"} | _TABLES, dict.fromkeys(_POINTERS, ANY_ADDRESS))
"""The tensors of a mask that is data, see `device.table_tile_schedule`; their addresses need no alignment."""

DROPOUT = shared.dropout(ANY_ADDRESS)
"""The seed needs no alignment: it may be any element of a tensor of seeds."""

STAMPS = Group({"pointer": "*i64", "heads": "i32"})
"""The buffer for timestamps of iterations, and the number of stamped query heads, see `device.stamps`."""

GRAD_LSE = Group({"ptr": "*fp32"} | dict.fromkeys(("b", "h", "row"), "i64"), {"ptr": ANY_ADDRESS})
"""The gradient of the log-sum-exp, [batch, q_heads, q_len or tokens], and its strides."""

OPERANDS = {"dropout": Parameter("dropout", DROPOUT)}
"""The parameters of the main kernel that take optional operands."""
PREPARE_OPERANDS = {"grad_lse": Parameter("grad_logsumexp", GRAD_LSE)}
"""The same of `prepare`."""

OUT_STRIDES, LSE_STRIDES = shared.strides(8), shared.strides(1)
"""Strides of 16-bit tensors, whose rows TMA reads, and of log-sum-exps."""

CONTRIBUTIONS = Group({"contributions": "*i32"} | _TABLES, {"contributions": ANY_ADDRESS})
"""Number of kv tiles that add to each q tile, int32 [tables, n_q], if the mask is data; strides as in `DATA`."""


class Schedule(NamedTuple):
    """The functions generated for a schedule, and two of its properties, as compile-time constants.

    PARTS: kv tiles per work id; CO_RESIDENT: CTAs wait for each other in both directions, so there is one CTA per work
    id, and all run at once.
    """

    LAUNCH: Any
    KV_TILE: Any
    VISITS: Any
    Q_TILE: Any
    RANK: Any
    Q_RANGE: Any
    SEEN_ROWS: Any
    SEEN_KEYS: Any
    PARTS: int
    CO_RESIDENT: bool


class MaskKind(NamedTuple):
    """The kind of a mask, as compile-time constants.

    HAS_LO, HAS_HI: whether the band has this bound; EVEN_KV: every kv tile is full, without a ragged last one;
    HAS_DENSE: the kernel reads mask bits, see `data.BackwardData`; AHEAD: it does so before it computes probabilities;
    VARLEN_ROWS: padded rows per row block of a varlen layout, 0 without one; HAS_RANGES: some form `is_range`; BY_HEAD:
    each query head has vectors of its own; SHARED: how many of the mask's per-query vectors are in shared memory, from
    the first; FORMS, Q_ROWS, KV_ROWS, QUERIES, KEYS: see `common.relations.Layout`.
    """

    HAS_LO: bool
    HAS_HI: bool
    EVEN_KV: bool
    HAS_DENSE: bool
    AHEAD: bool
    VARLEN_ROWS: int
    HAS_RANGES: bool
    BY_HEAD: bool
    SHARED: int
    FORMS: tuple[form.Form, ...]
    Q_ROWS: tuple[int, ...]
    KV_ROWS: tuple[int, ...]
    QUERIES: int
    KEYS: int


class Form(NamedTuple):
    """The tile sizes and the order of matmuls of the main kernel, as compile-time constants.

    GROUP: query heads per kv head; BLOCK_D + TAIL_D: columns of tiles of q and k; BLOCK_DV: columns of tiles of v;
    STAGES, DQ_STAGES: sizes of the rings of q and do, and of dq; STEP: "overlapped", "halved" or "shared", see
    `device.steps`; AHEAD: an iteration ends with (a half of) the matmul S = K Q^T of the next one, so a tile schedule
    begins with one; LEFT_IN_REGISTERS: K and V stay in registers as left operands; ROLE_REGISTERS: registers per thread
    of roles other than consumers.
    """

    GROUP: int
    BLOCK_Q: int
    BLOCK_KV: int
    BLOCK_D: int
    TAIL_D: int
    BLOCK_DV: int
    STAGES: int
    DQ_STAGES: int
    STEP: str
    AHEAD: bool
    LEFT_IN_REGISTERS: bool
    ROLE_REGISTERS: int


class Prepare(NamedTuple):
    """The sizes for which `prepare` is compiled, as compile-time constants.

    DIM: columns of out and its gradient; BLOCK_DV: columns of their tiles; HAS_DATA: the mask is data; VARLEN_ROWS:
    padded rows per row block of a varlen layout, 0 without one.
    """

    BLOCK_Q: int
    DIM: int
    BLOCK_DV: int
    HAS_DATA: bool
    VARLEN_ROWS: int


class Finish(NamedTuple):
    """The sizes for which `finish` is compiled, as compile-time constants.

    DIM: columns of dq; BLOCK_D + TAIL_D: columns of its accumulator; ROWS: rows per program; VARLEN_ROWS: padded rows
    per row block of a varlen layout, 0 without one.
    """

    BLOCK_Q: int
    BLOCK_KV: int
    DIM: int
    BLOCK_D: int
    TAIL_D: int
    ROWS: int
    VARLEN_ROWS: int
