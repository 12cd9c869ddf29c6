"""The host side of `tables`: checks the vectors of a mask, allocates, and launches the kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import compat
from ..errors import ArgumentError
from ..schedule.table_walk import TILE_BITS
from ..schedule.walk import Problem
from . import tables
from .mask_vectors import BackwardTables, ForwardTables, Vectors
from .strides import dense_strides

Q_TILES = 32
"""q tiles that a program of `classify` looks at together."""
ROWS, COLUMNS, HEADS = 32, 128, 32
"""kv tiles, q tiles (or rows of a launch) and heads that a program of the other kernels looks at together."""
CLASSIFY_WARPS, ARRANGE_WARPS, WRITE_WARPS = 4, 8, 4


def backward_tables(
    mask: Vectors, block_q: int, block_kv: int, heads: int, section: int, *, rows: int = ROWS, columns: int = COLUMNS
) -> BackwardTables:
    """The tables of `table_walk.Tables` for a mask, computed on its device.

    Args:
        block_q, block_kv: tile shape in tokens, powers of two.
        heads, section: as for `table_walk.Tables`.
        rows, columns: tiles that a program looks at together, powers of two; they change no result.

    Raises:
        ArgumentError: a tile shape, or numbers of tiles, heads or CTAs that the tables have no room for.
    """
    for name, value in (("heads", heads), ("section", section)):
        if value < 1:
            raise ArgumentError(name, value, "an integer >= 1")
    problem = _problem(mask, block_q, block_kv)
    ctas = mask.batch * heads * problem.n_kv
    if ctas >= 1 << 29:  # four times as much fits 32 bits
        raise ArgumentError("batch * heads * kv tiles", ctas, "less than 2**29")
    kinds = _classified(mask, problem, _Allocator(mask.device))
    return of_pairs(kinds, heads, section, rows=rows, columns=columns)


def of_pairs(kinds: Tensor, heads: int, section: int, *, rows: int = ROWS, columns: int = COLUMNS) -> BackwardTables:
    """The tables of tile pairs that are classified already.

    Args:
        kinds: int8 [batch, kv tiles, q tiles], contiguous, as `classify` writes them.
        heads, section, rows, columns: as for `backward_tables`.
    """
    batch, n_kv, n_q = kinds.shape
    section = min(section, batch * heads)  # a larger one is the same
    new = _Allocator(kinds.device)
    found = BackwardTables(
        new(batch, n_kv), new(batch, n_kv), new(batch, n_q * n_kv), new(batch, n_q), new(batch * heads * n_kv)
    )
    keys, ranks = new(batch, n_kv, dtype=torch.int64), new(batch, n_kv, n_q, dtype=torch.int16)
    places, order, longest = new(batch, n_kv), new(batch, n_kv), new(batch, n_q)
    _launch(
        tables.arrange, (batch,), kinds.device,
        kinds, found.base, found.visits, found.contributions, keys, places, order, longest, ranks, n_q, n_kv,
        ROWS=rows, COLUMNS=columns, num_warps=ARRANGE_WARPS, num_stages=1,
    )  # fmt: skip
    _launch(
        tables.write, (batch, n_kv), kinds.device,
        kinds, found.base, found.visits, keys, places, ranks, found.steps, found.tickets,
        batch, heads, n_q, n_kv, section, COLUMNS=columns, HEADS=HEADS, num_warps=WRITE_WARPS,
    )  # fmt: skip
    return found


def forward_tables(
    mask: Vectors, block_q: int, block_kv: int, *, rows: int = ROWS, columns: int = Q_TILES
) -> ForwardTables:
    """The kv tiles that each q tile sees, computed on the mask's device; arguments as for `backward_tables`."""
    problem = _problem(mask, block_q, block_kv)
    batch, n_q, n_kv = mask.batch, problem.n_q, problem.n_kv
    new = _Allocator(mask.device)
    kinds = _classified(mask, problem, new)
    found = ForwardTables(new(batch, n_q), new(batch, n_q * n_kv), new(batch, n_q))
    grid = batch, -(-n_q // columns)
    _launch(
        tables.write_rows, grid, mask.device, kinds, found.visits, found.steps, n_q, n_kv,
        ROWS=rows, COLUMNS=columns, num_warps=WRITE_WARPS,
    )  # fmt: skip
    _launch(
        tables.order_rows, grid, mask.device, found.visits, found.order, n_q, COLUMNS=columns, num_warps=WRITE_WARPS
    )
    return found


def _problem(mask: Vectors, block_q: int, block_kv: int) -> Problem:
    problem = Problem(mask.band, mask.q_len, mask.kv_len, block_q, block_kv)
    for name, block in (("block_q", block_q), ("block_kv", block_kv)):
        if block & (block - 1):
            raise ArgumentError(name, block, "a power of two")
    for name, tiles in (("q tiles", problem.n_q), ("kv tiles", problem.n_kv)):
        if tiles > 1 << TILE_BITS:
            raise ArgumentError(name, tiles, f"at most {1 << TILE_BITS}")
    return problem


class _Allocator:
    """Uninitialised contiguous tensors on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        if self.device.type != "cuda":
            return torch.empty(shape, dtype=dtype, device=self.device)
        with torch.cuda.device(self.device):
            return compat.empty_cuda(shape, dense_strides(shape, range(len(shape))), dtype)


def _classified(mask: Vectors, problem: Problem, new: _Allocator) -> Tensor:
    """int8 [batch, n_kv, n_q]: the kind of every tile pair."""
    kinds = new(mask.batch, problem.n_kv, problem.n_q, dtype=torch.int8)
    q_ids, kv_ids = mask.segments or (kinds, kinds)  # never read without segments
    valid = kinds if mask.valid is None else mask.valid
    strides = [stride for vector in (valid, q_ids, kv_ids) for stride in vector.stride()[:2]]
    band = problem.resolved.band
    _launch(
        tables.classify, (mask.batch, -(-problem.n_q // Q_TILES), problem.n_kv), mask.device,
        kinds, valid, q_ids, kv_ids, *strides, mask.q_len, mask.kv_len, *problem.bounds, problem.n_q, problem.n_kv,
        HAS_LO=band.lo is not None, HAS_HI=band.hi is not None, HAS_KEYS=mask.valid is not None,
        HAS_SEGMENTS=mask.segments is not None, BLOCK_Q=problem.block_q, BLOCK_KV=problem.block_kv, Q_TILES=Q_TILES,
        num_warps=CLASSIFY_WARPS,
    )  # fmt: skip
    return kinds


def _launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Launch on `device`; Triton itself uses the current one."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            kernel[grid](*arguments, **constants)
    else:  # Triton's interpreter
        kernel[grid](*arguments, **constants)
