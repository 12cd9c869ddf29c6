"""Builds `MaskTables` of a mask: the host code that allocates tensors and launches the kernels of `device.tables`.

Note [Tables of documents]
    A tile of packed documents has rows of one document only, and documents begin at tiles (`model.VarlenLayout`).  So
    the tiles that a tile sees are those that the band shows it within the document.  Under the schedules of `SHIFTED`
    the order of a tile schedule, and that of contributors, do not depend on where in the band tiles are.  Then the
    closed form for the document alone, counted from its first tiles, is what Note [Tables] defines, and one kernel
    writes it, without comparing ids of pairs.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...model.mask import ALIGNMENT, ROW_BLOCK, Band
from ...model.plan import Plan
from ...schedule.table_tile_schedule import FORWARD_TILE_BITS, TILE_BITS, backward_words, from_the_end, seen_words
from ...schedule.tile_schedule import Problem
from .compiling import schedule_module
from .device import document_tables, segment_ids, tables, tile_pairs
from .device.relations.between import KV_RANGES, write_kv_ranges
from .device.relations.equal import SEGMENT_IDS
from .device.relations.form import Vectors
from .launch_list import LaunchLists, Notes
from .launching import launch_kernel
from .mask_data import MaskData, MaskTables
from .relations import Layout, vectors
from .strides import dense_strides

TOKENS, PARTNERS, TOKEN_TILES = 64, 32, 512
"""Block sizes of `first_equal` and `seen`: tokens of a program, other tokens that are compared with them at once, and
tiles of TOKENS tokens whose ranges are compared at once."""
KV_RANGE_TOKENS = 256
"""Queries of a program of `write_kv_ranges`."""
Q_TILES, KV_TILES = 16, 4
"""q tiles and kv tiles of a program of `classify`, without an elementwise mask."""
DENSE_Q_TILES, DENSE_KV_TILES = 4, 1
"""q tiles and kv tiles of a program of `classify` that reads an elementwise mask."""
LINES = 16
"""Rows of a tile pair that `classify` reads at once."""
SHIFTED = ("ascending", "descending", "spt")
"""Schedules whose tile schedules and ranks follow from what kv tiles see, see Note [Tables of documents]."""
SLOTS = 64
"""Slots of rows that `write_document_tables` reads at once."""
ROWS, COLUMNS = 32, 128
"""kv tiles and q tiles that a program of the other kernels reads at once."""


@dataclass(frozen=True)
class Shape:
    """The number and sizes of the tables of a mask under a plan.

    Args:
        forward, backward: the mask's band with the lengths and tile sizes of the plan's forward (q tiles are single row
            blocks) and of its backward.
        consumers: row blocks (consumer warpgroups) of a q tile of the forward.
        tables: tables per batch element.
        band: the band of both, anchored top left.
        bounds: (lo, hi) of this band, 0 for a missing bound.
        num_warps: of the backward's consumers.
    """

    forward: Problem
    backward: Problem
    consumers: int
    tables: int
    band: Band
    bounds: tuple[int, int]
    num_warps: int

    @staticmethod
    def of(data: MaskData, plan: Plan) -> Shape:
        """Returns the shape of the tables of `data` under `plan`.

        Raises:
            ArgumentError: the plan keeps the graph's own forward, or tables cannot hold its number of tiles or the
                mask's components.
        """
        if not data.has_room:
            names = [kind.NAME for kind, _ in data.values]
            raise ArgumentError(
                "components", names, "one with bits of pairs, or several without: tables have no room for more"
            )
        sizes = data.batch, data.q_heads, data.q_len, data.kv_len
        return _shape(data.band, sizes, data.by_head, plan, ROW_BLOCK)

    @property
    def same_tiles(self) -> bool:
        """Whether forward and backward have equal tile sizes, so that the kinds of tile pairs are computed once."""
        return self.forward == self.backward

    @property
    def finer(self) -> tuple[int, int] | None:
        """The forward's tiles in a tile of the backward: (row blocks per q tile, kv tiles per kv tile).

        None if either is not an integer.
        """
        high, q_rest = divmod(self.backward.block_q, self.forward.block_q)
        wide, kv_rest = divmod(self.backward.block_kv, self.forward.block_kv)
        return None if q_rest or kv_rest else (high, wide)

    @property
    def seen_bits(self) -> tuple[int, ...]:
        """The shape of one table's bits of the elementwise mask: row blocks, kv tiles, threads, int32 words."""
        rows, keys = self.forward.block_q, self.forward.block_kv
        return self.forward.n_q, self.forward.n_kv, 2 * rows, seen_words(keys)

    @property
    def q_tiles(self) -> int:
        """The number of q tiles of a head in the forward, each of `consumers` row blocks."""
        return -(-self.forward.n_q // self.consumers)


@lru_cache(maxsize=256)
def _shape(band: Band, sizes: tuple[int, int, int, int], by_head: bool, plan: Plan, row_block: int) -> Shape:
    tiles = plan.forward_tiles
    if tiles is None:
        raise ArgumentError("plan.forward_tiles", None, "tiles: a mask that is data needs a forward of ours")
    batch, q_heads, q_len, kv_len = sizes
    forward = Problem(band, q_len, kv_len, row_block, tiles.block_kv, batch, q_heads)
    backward = Problem(band, q_len, kv_len, plan.dkdv.block_q, plan.dkdv.block_kv, batch, q_heads)
    for name, count, bits in (
        ("q tiles", backward.n_q, TILE_BITS),
        ("kv tiles", backward.n_kv, TILE_BITS),
        ("kv tiles of the forward", forward.n_kv, FORWARD_TILE_BITS),
    ):
        if count > 1 << bits:
            raise ArgumentError(name, count, f"at most {1 << bits}")
    return Shape(
        forward,
        backward,
        tiles.block_q // row_block,
        q_heads if by_head else 1,
        backward.resolved.band,
        backward.bounds,
        plan.dkdv.num_warps,
    )


CALLS = LaunchLists()
"""Launch lists of the operator that builds tables."""


def build(data: MaskData, plan: Plan, has_backward: bool = True, notes: Notes | None = None) -> MaskTables:
    """Builds the tables of a mask for the Hopper kernels of a plan, on the mask's device.

    Args:
        has_backward: whether a backward reads the tables, too; if not, what only that reads is empty.
        notes: records the allocations and launches, for a replay.

    Raises:
        ArgumentError: as `Shape.of`.
    """
    device = data.device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # Triton uses the current device
        return _Builder(data, plan, notes or Notes([])).build(has_backward)


class _Builder:
    """Launches the kernels that build tables.

    Attributes:
        data: the mask; with kv ranges by head, that of `MaskData.of_heads`.
        elements: the batch size of the call.
        heads: the tables of a batch element of `data`.
    """

    def __init__(self, data: MaskData, plan: Plan, notes: Notes) -> None:
        self.notes = notes
        self.plan, self.shape, self.elements = plan, Shape.of(data, plan), data.batch
        self.data = data = data.of_heads()
        self.heads = self.shape.tables * self.elements // data.batch
        self.lo, self.hi = self.shape.bounds
        self.device = data.device
        self.token_tiles = -(-data.q_len // TOKENS), -(-data.kv_len // TOKENS)
        self.tokens = segment_ids.Tokens(TOKENS, PARTNERS, TOKEN_TILES)
        band, self.vectors = self.shape.band, vectors(data)
        self.layout = Layout.of([of.form for of in self.vectors])
        bounds = band.lo is not None, band.hi is not None
        others = any(of.form is not SEGMENT_IDS for of in self.vectors)
        self.mask = tile_pairs.Mask(
            *bounds, HAS_SEGMENT_IDS=self.layout.has_segment_ids, HAS_RANGES=self.layout.has_ranges, HAS_OTHERS=others,
            HAS_DENSE=data.dense is not None, **self.layout._asdict(),
        )  # fmt: skip

    def build(self, has_backward: bool) -> MaskTables:
        if self.data.varlen and has_backward and self.plan.schedule in SHIFTED:
            return self._of_documents()
        q_vectors, kv_vectors, ranges = self._vectors()
        both = q_vectors, kv_vectors
        rows_seeing, keys_seen = self._seen(*both, ranges)
        seen_bits = self._new(0)
        if self.data.dense is None:
            of_rows = self._classified(self.shape.forward, *both)
        else:
            of_rows, seen_bits = self._seen_bits(*both)
        rows = (self._new(0), self._new(0)) if self.data.varlen else self._rows(of_rows, keys_seen)
        if not has_backward:
            return MaskTables(*both, keys_seen, *rows, seen_bits, *(self._new(0) for _ in range(4)))
        kinds = self._of_backward(of_rows, *both)
        tile_schedules = self._tile_schedules(kinds, rows_seeing)
        backward_bits = self._new(0) if self.data.dense is None else self._backward_bits(kinds, *both)
        return MaskTables(*both, keys_seen, *rows, seen_bits, *tile_schedules, backward_bits)

    def _of_backward(self, of_rows: Tensor, q_vectors: Tensor, kv_vectors: Tensor) -> Tensor:
        """Returns the kinds of the backward's tile pairs; of_rows: those of the forward's."""
        shape = self.shape
        if shape.same_tiles:
            return of_rows
        if shape.finer is not None:
            return self._united(of_rows, *shape.finer)
        return self._classified(shape.backward, q_vectors, kv_vectors)

    def _of_documents(self) -> MaskTables:
        """Builds the tables of packed documents, see Note [Tables of documents]."""
        (of,), problem, rows = self.vectors, self.shape.backward, self.data.q_len
        queries, keys = of.values["q"], of.values["kv"]
        both, keys_seen = (self._new(1, 1, rows), self._new(1, 1, rows)), self._new(1, 1, rows, dtype=torch.bool)
        visits, steps = self._new(1, problem.n_kv), self._new(1, problem.n_kv, problem.n_q)
        contributions = self._new(1, problem.n_q)
        functions = schedule_module(self.plan.schedule, self.shape.band)
        slots = rows // ALIGNMENT
        blocks = document_tables.Blocks(problem.block_q, problem.block_kv, ALIGNMENT, SLOTS, COLUMNS)
        self._launch(
            document_tables.write_document_tables, (slots,), queries, keys, *both, keys_seen, visits, steps,
            contributions, queries.stride(1), keys.stride(1), slots, self.lo, self.hi, problem.n_q,
            TILE_SCHEDULE_LENGTH=functions.dash_visits, Q_TILE=functions.dash_q_tile, RANK=functions.dash_rank,
            KV_RANGE=functions.dash_kv_range, BLOCKS=blocks,
        )  # fmt: skip
        of_forward = self._new(0), self._new(0), self._new(0)  # it reads `document_tiles`
        return MaskTables(*both, keys_seen, *of_forward, visits, steps, contributions, self._new(0))

    def _vectors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the vectors of queries and of keys, and the ranges of the first segment ids of both by tiles of
        TOKENS.

        Tensors that would have no vectors are empty.
        """
        data, layout = self.data, self.layout
        q_vectors = self._new(data.batch, layout.QUERIES, data.q_len) if layout.QUERIES else self._new(0)
        kv_vectors = self._new(data.batch, layout.KEYS, data.kv_len) if layout.KEYS else self._new(0)
        ranges = self._new(0)
        for i, (of, q_row, kv_row) in enumerate(zip(self.vectors, layout.Q_ROWS, layout.KV_ROWS, strict=True)):
            if of.form is SEGMENT_IDS:
                found = self._segment_ids(of, q_vectors[:, q_row], kv_vectors[:, kv_row])
                ranges = found if i == 0 else ranges
                continue
            if of.form is KV_RANGES:
                self._kv_ranges(of, q_vectors[:, q_row:])
                continue
            self.notes.refuse()  # PyTorch operators are not recorded
            queries, keys = of.form.vectors(of, data)
            q_vectors[:, q_row : q_row + of.form.queries] = queries
            if of.form.keys:
                kv_vectors[:, kv_row : kv_row + of.form.keys] = keys
        return q_vectors, kv_vectors, ranges

    def _segment_ids(self, of: Vectors, q_segment_ids: Tensor, kv_segment_ids: Tensor) -> Tensor:
        """Writes the segment ids of queries and keys, [batch, tokens]; returns their ranges by tile."""
        data = self.data
        q_tiles, kv_tiles = self.token_tiles
        ranges = self._new(data.batch, q_tiles + kv_tiles, 2)
        has_ids, valid = bool(of.values), kv_segment_ids if of.valid is None else of.valid
        q_ids, kv_ids = q_segment_ids, kv_segment_ids  # never read without ids
        starts = ranges
        if has_ids:
            q_ids, kv_ids = of.values["q"], of.values["kv"]
            starts = self._new(data.batch, kv_tiles, 2, dtype=torch.int64)
            self._launch(
                segment_ids.find_starts, (data.batch, kv_tiles), kv_ids, starts, *kv_ids.stride(), data.kv_len,
                BLOCK=TOKENS,
            )  # fmt: skip
        self._launch(
            segment_ids.first_equal, (data.batch, q_tiles + kv_tiles),
            q_ids, kv_ids, starts, valid, q_segment_ids, kv_segment_ids, ranges,
            *q_ids.stride(), *kv_ids.stride(), *valid.stride(), data.q_len, data.kv_len,
            HAS_IDS=has_ids, HAS_VALID=of.valid is not None, QUERIES=self.layout.QUERIES, KEYS=self.layout.KEYS,
            TOKENS=self.tokens,
        )  # fmt: skip
        return ranges

    def _kv_ranges(self, of: Vectors, found: Tensor) -> None:
        """Writes the kv ranges of queries to the first two of the vectors `found`, [batch, vectors, q_len]."""
        data = self.data
        least, most = (of.values.get(role) for role in ("least", "most"))
        nothing = found[:, 0]  # never read
        operands = [nothing if bound is None else bound for bound in (least, most)]
        self._launch(
            write_kv_ranges, (data.batch, -(-data.q_len // KV_RANGE_TOKENS)),
            *operands, found, *(stride for bound in operands for stride in bound.stride()), data.q_len, data.kv_len,
            self.lo, self.hi, HAS_LEAST=least is not None, HAS_MOST=most is not None, HAS_LO=self.mask.HAS_LO,
            HAS_HI=self.mask.HAS_HI, QUERIES=self.layout.QUERIES, BLOCK=KV_RANGE_TOKENS,
        )  # fmt: skip

    def _dense(self, fallback: Tensor) -> tuple[Tensor, list[int]]:
        """Returns the elementwise mask and its strides, zero where it broadcasts; without one, `fallback` and zeros."""
        dense = self.data.dense
        if dense is None:
            return fallback, [0, 0, 0, 0]
        return dense, [0 if size == 1 else stride for size, stride in zip(dense.shape, dense.stride(), strict=True)]

    def _seen(self, q_vectors: Tensor, kv_vectors: Tensor, ranges: Tensor) -> tuple[Tensor, Tensor]:
        """Returns bool [batch, 1 or q_heads, q_len], queries that see a key, and [.., kv_len], keys that a query
        sees.
        """
        data, heads, shape = self.data, self.heads, (self.elements, self.shape.tables)
        q_found, kv_found = (self._new(*shape, n, dtype=torch.bool) for n in (data.q_len, data.kv_len))
        dense, strides = self._dense(q_found)
        self._launch(
            tile_pairs.seen, (data.batch * heads, sum(self.token_tiles)),
            q_vectors, kv_vectors, ranges, dense, q_found, kv_found, *strides, heads, data.q_len, data.kv_len,
            self.lo, self.hi, MASK=self.mask, TOKENS=self.tokens,
        )  # fmt: skip
        return q_found, kv_found

    def _classified(self, problem: Problem, q_vectors: Tensor, kv_vectors: Tensor) -> Tensor:
        """Returns the kinds of all tile pairs: int8 [tables, n_kv, n_q]."""
        data = self.data
        kinds = self._new(data.batch * self.heads, problem.n_kv, problem.n_q, dtype=torch.int8)
        dense, strides = self._dense(kinds)
        q_tiles, kv_tiles = (Q_TILES, KV_TILES) if data.dense is None else (DENSE_Q_TILES, DENSE_KV_TILES)
        self._launch(
            tile_pairs.classify, (len(kinds), -(-problem.n_q // q_tiles), -(-problem.n_kv // kv_tiles)),
            kinds, q_vectors, kv_vectors, dense, *strides, self.heads, data.q_len, data.kv_len, self.lo, self.hi,
            problem.n_q, problem.n_kv, MASK=self.mask,
            PAIRS=tile_pairs.Pairs(problem.block_q, problem.block_kv, q_tiles, kv_tiles, min(LINES, problem.block_q)),
        )  # fmt: skip
        return kinds

    def _seen_bits(self, q_vectors: Tensor, kv_vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the kinds of the forward's tile pairs, as `_classified`, and `MaskTables.seen_bits`."""
        data, problem = self.data, self.shape.forward
        tables_, (n_q, n_kv, *_, words) = data.batch * self.heads, self.shape.seen_bits
        kinds = self._new(tables_, n_kv, n_q, dtype=torch.int8)
        seen_bits = self._new(tables_, *self.shape.seen_bits)
        dense, strides = self._dense(kinds)
        self._launch(
            tile_pairs.write_seen, (tables_, n_q, n_kv),
            kinds, seen_bits, q_vectors, kv_vectors, dense, *strides, self.heads, data.q_len, data.kv_len,
            self.lo, self.hi, MASK=self.mask,
            BLOCK_Q=problem.block_q, BLOCK_KV=problem.block_kv, WORDS=words,
        )  # fmt: skip
        return kinds, seen_bits

    def _backward_bits(self, kinds: Tensor, q_vectors: Tensor, kv_vectors: Tensor) -> Tensor:
        """Returns `MaskTables.backward_bits`; kinds: those of the backward's tile pairs."""
        data, problem = self.data, self.shape.backward
        words, threads = backward_words(problem.block_q, problem.block_kv, self.shape.num_warps)
        found = self._new(len(kinds), problem.n_kv, problem.n_q, words, threads)
        dense, strides = self._dense(kinds)
        self._launch(
            tile_pairs.write_backward_bits, (len(kinds), problem.n_q, problem.n_kv),
            kinds, found, q_vectors, kv_vectors, dense, *strides, self.heads, data.q_len, data.kv_len, self.lo, self.hi,
            MASK=self.mask, BLOCK_Q=problem.block_q, BLOCK_KV=problem.block_kv, WORDS=words, THREADS=threads,
        )  # fmt: skip
        return found

    def _united(self, fine: Tensor, high: int, wide: int) -> Tensor:
        """Returns the kinds of the backward's tile pairs, each from `high` x `wide` tile pairs of the forward."""
        problem = self.shape.backward
        kinds = self._new(len(fine), problem.n_kv, problem.n_q, dtype=torch.int8)
        self._launch(
            tile_pairs.unite_kinds, (len(fine), problem.n_kv, -(-problem.n_q // COLUMNS)),
            fine, kinds, self.data.kv_len, self.shape.forward.n_q, self.shape.forward.n_kv, problem.n_q, problem.n_kv,
            HIGH=high, WIDE=wide, BLOCK_KV=problem.block_kv, COLUMNS=COLUMNS,
        )  # fmt: skip
        return kinds

    def _rows(self, kinds: Tensor, keys_seen: Tensor) -> tuple[Tensor, Tensor]:
        problem, q_tiles = self.shape.forward, self.shape.q_tiles
        counts, steps = self._new(len(kinds), q_tiles), self._new(len(kinds), q_tiles, problem.n_kv)
        self._launch(
            tables.write_rows, (len(kinds), q_tiles),
            kinds, keys_seen, counts, steps, self.data.kv_len, problem.n_q, problem.n_kv, q_tiles,
            FROM_THE_END=from_the_end(self.mask.HAS_LO, self.mask.HAS_DENSE),
            CONSUMERS=self.shape.consumers, BLOCK_KV=problem.block_kv, COLUMNS=COLUMNS,
        )  # fmt: skip
        return counts, steps

    def _tile_schedules(self, kinds: Tensor, rows_seeing: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        data, problem = self.data, self.shape.backward
        number, n_q, n_kv = len(kinds), problem.n_q, problem.n_kv
        visits, steps = self._new(number, n_kv), self._new(number, n_kv, n_q)
        contributions, ranks = self._new(number, n_q), self._new(number, n_kv, n_q)
        functions = schedule_module(self.plan.schedule, self.shape.band)
        tile_schedule = data.q_len, data.kv_len, self.lo, self.hi, n_q, n_kv
        constants = {"BLOCK_Q": problem.block_q, "BLOCK_KV": problem.block_kv, "COLUMNS": COLUMNS}
        self._launch(
            tables.rank_contributors, (number, n_kv + 1, -(-n_q // COLUMNS)),
            kinds, ranks, contributions, *tile_schedule, RANK=functions.dash_rank, ROWS=ROWS, **constants,
        )  # fmt: skip
        self._launch(
            tables.write_tile_schedules, (number, n_kv), kinds, ranks, rows_seeing, visits, steps, *tile_schedule,
            TILE_SCHEDULE_LENGTH=functions.dash_visits, Q_TILE=functions.dash_q_tile, **constants,
        )  # fmt: skip
        return visits, steps, contributions

    def _new(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Allocates an uninitialised contiguous tensor on the mask's device, which is the current one."""
        if self.device.type != "cuda":
            return torch.empty(shape, dtype=dtype, device=self.device)
        return self.notes.allocate(shape, dense_strides(shape, range(len(shape))), dtype)

    def _launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Tensor | int, **constants: Any) -> None:
        self.notes.launched(launch_kernel(kernel, self.device, grid, *arguments, **constants), arguments)
