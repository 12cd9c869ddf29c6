"""The host side of `tables`: allocates, and launches the kernels that make `MaskTables` of a mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import compat
from ..errors import ArgumentError
from ..model.plan import Plan
from ..schedule.schedules import define
from ..schedule.table_walk import FORWARD_TILE_BITS, TILE_BITS
from ..schedule.walk import Problem
from . import tables
from .hopper.compiling import schedule_module
from .mask_data import MaskData, MaskTables
from .strides import dense_strides

ROW_BLOCK = 64
"""Queries of a row block of the Hopper forward."""
TOKENS, PARTNERS = 64, 32
"""Tokens that a program of `first_equal` and `seen` looks at together, and partners of theirs in `seen`."""
Q_TILES = 16
"""q tiles that a program of `classify` looks at together."""
ROWS, COLUMNS = 32, 128
"""kv tiles and q tiles that a program of the other kernels looks at together."""


@dataclass(frozen=True)
class Shape:
    """The tables of a mask under a plan: how many there are, and of which size.

    Args:
        forward, backward: the mask's band cut into the tiles of the plan's forward, one row block high, and of its
            backward.
        consumers: row blocks of a tile of the forward.
        row_tables, walk_tables: tables of a batch element, of forward and backward.
    """

    forward: Problem
    backward: Problem
    consumers: int
    row_tables: int
    walk_tables: int

    @staticmethod
    def of(data: MaskData, plan: Plan) -> Shape:
        """Raises ArgumentError where the plan has no forward of ours, or the tables no room for its tiles."""
        tiles = plan.forward_tiles
        if tiles is None:
            raise ArgumentError("plan.forward_tiles", None, "tiles: a mask that is data needs a forward of ours")
        lengths, many = (data.q_len, data.kv_len), {"batch": data.batch, "heads": data.q_heads}
        forward = Problem(data.band, *lengths, ROW_BLOCK, tiles.block_kv, **many)
        backward = Problem(data.band, *lengths, plan.dkdv.block_q, plan.dkdv.block_kv, **many)
        for name, count, bits in (
            ("q tiles", backward.n_q, TILE_BITS),
            ("kv tiles", backward.n_kv, TILE_BITS),
            ("kv tiles of the forward", forward.n_kv, FORWARD_TILE_BITS),
        ):
            if count > 1 << bits:
                raise ArgumentError(name, count, f"at most {1 << bits}")
        kinds = define(plan.schedule, data.band).kinds
        return Shape(
            forward,
            backward,
            tiles.block_q // ROW_BLOCK,
            data.q_heads if data.by_head else 1,
            data.q_heads if data.by_head else kinds,
        )

    @property
    def q_tiles(self) -> int:
        """Tiles of a head in the forward."""
        return -(-self.forward.n_q // self.consumers)


def build(data: MaskData, plan: Plan) -> MaskTables:
    """The tables of a mask for the Hopper kernels of a plan, computed on the mask's device.

    Raises:
        ArgumentError: as `Shape.of`.
    """
    return _Builder(data, plan).build()


class _Builder:
    def __init__(self, data: MaskData, plan: Plan) -> None:
        self.data, self.plan, self.shape = data, plan, Shape.of(data, plan)
        band = self.shape.backward.resolved.band
        self.bounds = {"HAS_LO": band.lo is not None, "HAS_HI": band.hi is not None}
        self.lo, self.hi = self.shape.backward.bounds
        self.kinds_heads = data.q_heads if data.by_head else 1
        self.flags = {"HAS_CODES": data.has_codes, "HAS_DENSE": data.dense is not None}

    def build(self) -> MaskTables:
        q_codes, kv_codes = self._codes()
        rows_seeing = self._seen(q_codes, kv_codes, of_keys=False)
        keys_seen = self._seen(q_codes, kv_codes, of_keys=True)
        if self.data.by_head:  # heads of a group share their keys
            keys_seen = keys_seen.unflatten(1, (self.data.kv_heads, -1)).any(2)
        counts, row_steps = self._rows(self._classified(self.shape.forward, q_codes, kv_codes))
        walks = self._walks(self._classified(self.shape.backward, q_codes, kv_codes))
        return MaskTables(q_codes, kv_codes, rows_seeing, keys_seen, counts, row_steps, *walks)

    def _codes(self) -> tuple[Tensor, Tensor]:
        data = self.data
        if not data.has_codes:
            return self._new(0), self._new(0)
        q_codes, kv_codes = self._new(data.batch, data.q_len), self._new(data.batch, data.kv_len)
        q_ids, kv_ids = data.segments or (q_codes, kv_codes)  # never read without segments
        valid = kv_codes if data.valid is None else data.valid
        for codes, ids, of_keys in ((q_codes, q_ids, False), (kv_codes, kv_ids, True)):
            length = codes.shape[1]
            self._launch(
                tables.first_equal, (data.batch, -(-length // TOKENS)),
                ids, kv_ids, valid, codes, *ids.stride(), *kv_ids.stride(), *valid.stride(), length, data.kv_len,
                OF_KEYS=of_keys, HAS_IDS=data.segments is not None, HAS_VALID=data.valid is not None, BLOCK=TOKENS,
            )  # fmt: skip
        return q_codes, kv_codes

    def _dense(self, fallback: Tensor) -> tuple[Tensor, list[int]]:
        """The dense mask, and its strides, zero where it has size 1; `fallback` is passed where there is none."""
        dense = self.data.dense
        if dense is None:
            return fallback, [0, 0, 0, 0]
        return dense, [0 if size == 1 else stride for size, stride in zip(dense.shape, dense.stride(), strict=True)]

    def _seen(self, q_codes: Tensor, kv_codes: Tensor, *, of_keys: bool) -> Tensor:
        """bool [batch, 1 or q_heads, length]: who has a partner."""
        data, bounds, lo, hi = self.data, self.bounds, self.lo, self.hi
        codes, others, lengths = (q_codes, kv_codes), (kv_codes, q_codes), (data.q_len, data.kv_len)
        found = self._new(data.batch, self.kinds_heads, lengths[of_keys], dtype=torch.bool)
        dense, (b, h, i, j) = self._dense(found)
        if of_keys:
            lo, hi, i, j = -hi, -lo, j, i
            bounds = {"HAS_LO": bounds["HAS_HI"], "HAS_HI": bounds["HAS_LO"]}
        self._launch(
            tables.seen, (data.batch * self.kinds_heads, -(-lengths[of_keys] // TOKENS)),
            codes[of_keys], others[of_keys], dense, found, b, h, i, j, self.kinds_heads, lengths[of_keys],
            lengths[not of_keys], lo, hi, **bounds, **self.flags, BLOCK=TOKENS, PARTNERS=PARTNERS,
        )  # fmt: skip
        return found

    def _classified(self, problem: Problem, q_codes: Tensor, kv_codes: Tensor) -> Tensor:
        """int8 [batch and heads that differ, n_kv, n_q]: the kind of every tile pair."""
        data = self.data
        kinds = self._new(data.batch * self.kinds_heads, problem.n_kv, problem.n_q, dtype=torch.int8)
        dense, strides = self._dense(kinds)
        self._launch(
            tables.classify, (len(kinds), -(-problem.n_q // Q_TILES), problem.n_kv),
            kinds, q_codes, kv_codes, dense, *strides, self.kinds_heads, data.q_len, data.kv_len, self.lo, self.hi,
            problem.n_q, problem.n_kv, **self.bounds, **self.flags,
            BLOCK_Q=problem.block_q, BLOCK_KV=problem.block_kv, Q_TILES=Q_TILES,
        )  # fmt: skip
        return kinds

    def _rows(self, kinds: Tensor) -> tuple[Tensor, Tensor]:
        problem, q_tiles = self.shape.forward, self.shape.q_tiles
        counts, steps = self._new(len(kinds), q_tiles), self._new(len(kinds), q_tiles, problem.n_kv)
        self._launch(
            tables.write_rows, (len(kinds), q_tiles), kinds, counts, steps, problem.n_q, problem.n_kv, q_tiles,
            FROM_THE_END=self.bounds["HAS_LO"], CONSUMERS=self.shape.consumers, COLUMNS=COLUMNS,
        )  # fmt: skip
        return counts, steps

    def _walks(self, kinds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        data, problem, each = self.data, self.shape.backward, self.shape.walk_tables
        number, n_q, n_kv = data.batch * each, problem.n_q, problem.n_kv
        visits, steps = self._new(number, n_kv), self._new(number, n_kv, n_q)
        contributions = self._new(number, n_q)
        functions = schedule_module(self.plan.schedule, problem.resolved.band)
        self._launch(
            tables.write_walks, (number, n_kv),
            kinds, visits, steps, each, data.q_heads, data.q_len, data.kv_len, self.lo, self.hi, n_q, n_kv,
            WALK_LENGTH=functions.dash_visits, Q_TILE=functions.dash_q_tile, RANK=functions.dash_rank,
            GROUP=data.q_heads // data.kv_heads, BY_HEAD=data.by_head,
            BLOCK_Q=problem.block_q, BLOCK_KV=problem.block_kv, COLUMNS=COLUMNS,
        )  # fmt: skip
        self._launch(
            tables.count_contributions, (number, -(-n_q // COLUMNS)), kinds, contributions, each, n_q, n_kv,
            BY_HEAD=data.by_head, ROWS=ROWS, COLUMNS=COLUMNS,
        )  # fmt: skip
        return visits, steps, contributions

    def _new(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """An uninitialised contiguous tensor on the mask's device."""
        device = self.data.device
        if device.type != "cuda":
            return torch.empty(shape, dtype=dtype, device=device)
        with torch.cuda.device(device):
            return compat.empty_cuda(shape, dense_strides(shape, range(len(shape))), dtype)

    def _launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Launch on the mask's device; Triton itself uses the current one."""
        device = self.data.device
        if device.type == "cuda":
            with torch.cuda.device(device):
                kernel[grid](*arguments, **constants, num_warps=4)
        else:  # Triton's interpreter
            kernel[grid](*arguments, **constants, num_warps=4)
