"""`MaskTables` in plain Python and torch, from their definitions: the CPU implementation and the tests' oracle."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from ...model.plan import Plan
from ...model.relations import Axis
from ...schedule.table_tile_schedule import Tables, backward_words, forward_packed_tiles, from_the_end
from ...schedule.tile_schedule import Problem
from ...schedule.visibility import EMPTY, FULL, PARTIAL
from ..common.mask_data import MaskData, MaskTables
from ..common.mask_tables import Shape
from ..common.relations import vectors
from .backward import visible


def build(data: MaskData, plan: Plan, has_backward: bool = True) -> MaskTables:
    """Builds the tables that `mask_tables.build` builds; steps after the end of a tile schedule are zero.

    Raises:
        ArgumentError: as `mask_tables.Shape.of`.
    """
    shape = Shape.of(data, plan)
    shown = _shown(data).expand(-1, shape.tables, -1, -1)
    nothing = torch.empty(0, dtype=torch.int32, device=data.device)
    rows = (nothing, nothing.clone()) if data.varlen else _rows(shape, shown, data.dense is not None)
    seen_bits = nothing.clone() if data.dense is None else _seen_bits(shape, shown)
    of_forward = *_vectors(data.of_heads()), shown.any(2).expand(-1, shape.tables, -1).contiguous(), *rows, seen_bits
    if not has_backward:
        return MaskTables(*of_forward, *(nothing.clone() for _ in range(4)))
    backward_bits = nothing.clone() if data.dense is None else backward_bits_of(shown, shape.backward, shape.num_warps)
    return MaskTables(*of_forward, *_tile_schedules(data, shape, plan, shown), backward_bits)


def _shown(data: MaskData) -> Tensor:
    """Returns whether queries see keys: bool [batch, 1 or q_heads, q_len, kv_len]."""
    band = Problem(data.band, data.q_len, data.kv_len, data.q_len, data.kv_len).resolved.band
    rows, keys = (torch.arange(length, device=data.device) for length in (data.q_len, data.kv_len))
    shown = visible(band, rows, keys).expand(data.batch, 1, -1, -1)
    for component, values in data.values:
        parts = {field: _of_pairs(value, component.AXES[field]) for field, value in values.items()}
        shown = shown & component.shows(parts, keys)
    return shown


def _of_pairs(value: Tensor, axes: tuple[Axis, ...]) -> Tensor:
    """Returns an operand of a component in a shape that broadcasts to [batch, q_heads, q_len, kv_len]."""
    if "h" in axes:
        return value
    return value[:, None, :, None] if "q" in axes else value[:, None, None]


def _vectors(data: MaskData) -> tuple[Tensor, Tensor]:
    """Returns the vectors of queries and of keys."""
    found = [of.form.vectors(of, data) for of in vectors(data)]
    nothing = torch.empty(0, dtype=torch.int32, device=data.device)
    both = (torch.cat(side, 1) if side else nothing for side in zip(*found, strict=True)) if found else (nothing,) * 2
    q_vectors, kv_vectors = (side if side.numel() else nothing.clone() for side in both)
    return q_vectors, kv_vectors


def tile_kinds(shown: Tensor, block_q: int, block_kv: int) -> list[list[list[int]]]:
    """Returns the kind of every tile pair, as `schedule.visibility` defines it: a list by table, q tile and kv tile.

    shown: bool [batch, heads, q_len, kv_len], which pairs are visible.
    """
    kinds = []
    for element in shown.flatten(0, -3):
        of_element = []
        for rows in element.split(block_q):
            tiles = rows.split(block_kv, dim=1)
            of_element.append(
                [
                    EMPTY if not tile.any() else FULL if tile.all() and tile.shape[1] == block_kv else PARTIAL
                    for tile in tiles
                ]
            )
        kinds.append(of_element)
    return kinds


def _lacking(found: Tensor, block: int) -> list[set[int]]:
    """Returns, per row, which tiles of `block` tokens have one without a partner; found: bool [.., length]."""
    rows = found.flatten(0, -2)
    return [{i for i, tile in enumerate(row.split(block)) if not tile.all()} for row in rows]


def _rows(shape: Shape, shown: Tensor, has_dense: bool) -> tuple[Tensor, Tensor]:
    problem, consumers = shape.forward, shape.consumers
    elements = tile_kinds(shown, problem.block_q, problem.block_kv)
    counts = torch.zeros(len(elements), shape.q_tiles, dtype=torch.int32)
    steps = torch.zeros(len(elements), shape.q_tiles, problem.n_kv, dtype=torch.int32)
    backwards = from_the_end(problem.resolved.band.lo is not None, has_dense)
    nothing, unseen = [EMPTY] * problem.n_kv, _lacking(shown.any(2), problem.block_kv)
    for (t, element), tile in itertools.product(enumerate(elements), range(shape.q_tiles)):
        first = problem.n_q - (tile + 1) * consumers if backwards else tile * consumers
        blocks = [element[i] if 0 <= i < problem.n_q else nothing for i in range(first, first + consumers)]
        packed_tiles = forward_packed_tiles(blocks, PARTIAL, unseen[t])
        counts[t, tile] = len(packed_tiles)
        steps[t, tile, : len(packed_tiles)] = torch.tensor(packed_tiles, dtype=torch.int32)
    return counts.to(shown.device), steps.to(shown.device)


def _seen_bits(shape: Shape, shown: Tensor) -> Tensor:
    """Returns the bits that Note [Seen bits] in `schedule.table_tile_schedule` defines."""
    blocks, n_kv, threads, words = shape.seen_bits
    rows, keys = shape.forward.block_q, shape.forward.block_kv
    thread, word = torch.arange(threads)[:, None, None], torch.arange(words)[:, None]
    bit = torch.arange(keys // words // 2)
    row = 16 * (thread // 32) + 8 * (bit // 2 % 2) + thread // 4 % 8
    key = 64 * word + 8 * (bit // 4) + 2 * (thread % 4) + bit % 2
    whole = torch.zeros(shown.shape[:2].numel(), blocks * rows, n_kv * keys, dtype=torch.bool, device=shown.device)
    whole[:, : shown.shape[2], : shown.shape[3]] = shown.flatten(0, 1)
    tiles = whole.unflatten(1, (blocks, rows)).unflatten(3, (n_kv, keys)).transpose(2, 3)
    bits: Tensor = (tiles[..., row, key].long() << bit.to(shown.device)).sum(-1)
    return bits.to(torch.int32)


def backward_bits_of(shown: Tensor, problem: Problem, num_warps: int) -> Tensor:
    """Returns the bits of the backward, which Note [Seen bits] in `schedule.table_tile_schedule` defines, for all tile
    pairs.

    Args:
        shown: bool [batch, heads, q_len, kv_len], which pairs are visible.
        problem: the backward's lengths and tiles.
        num_warps: of its consumers.
    """
    n_kv, n_q, keys, queries = problem.n_kv, problem.n_q, problem.block_kv, problem.block_q
    words, threads = backward_words(queries, keys, num_warps)
    along = min(threads // 32, keys // 16)
    word, thread = torch.arange(words)[:, None, None], torch.arange(threads)[:, None]
    bit = torch.arange(keys * queries // threads // words)
    key = 16 * (thread // 32 % along) + 8 * (bit // 2 % 2) + thread // 4 % 8
    columns = queries * 32 * along // threads
    query = columns * (thread // 32 // along) + 2 * len(bit) * word + 8 * (bit // 4) + 2 * (thread % 4) + bit % 2
    whole = torch.zeros(shown.shape[:2].numel(), n_q * queries, n_kv * keys, dtype=torch.bool, device=shown.device)
    whole[:, : shown.shape[2], : shown.shape[3]] = shown.flatten(0, 1)
    tiles = whole.unflatten(1, (n_q, queries)).unflatten(3, (n_kv, keys)).permute(0, 3, 1, 2, 4)
    bits: Tensor = (tiles[..., query, key].long() << bit.to(shown.device)).sum(-1)
    return bits.to(torch.int32)


def _tile_schedules(data: MaskData, shape: Shape, plan: Plan, shown: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    problem = shape.backward
    elements = tile_kinds(shown, problem.block_q, problem.block_kv)
    blind = _lacking(shown.any(3), problem.block_q)
    heads = data.q_heads if data.by_head else 1
    tile_schedule = Tables(plan.schedule, replace(problem, heads=heads), elements)
    number = data.batch * heads
    visits = torch.zeros(number, problem.n_kv, dtype=torch.int32)
    steps = torch.zeros(number, problem.n_kv, problem.n_q, dtype=torch.int32)
    contributions = torch.zeros(number, problem.n_q, dtype=torch.int32)
    for t in range(number):
        for kv in range(problem.n_kv):
            packed_tiles = tile_schedule.packed_tiles(t, kv, blind[t])
            visits[t, kv] = len(packed_tiles)
            steps[t, kv, : len(packed_tiles)] = torch.tensor(packed_tiles, dtype=torch.int32)
        contributions[t] = torch.tensor([len(tile_schedule.visible(t, q)) for q in range(problem.n_q)])
    return visits.to(data.device), steps.to(data.device), contributions.to(data.device)
