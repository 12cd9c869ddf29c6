"""The reference executor against direct sums in the order of the schedule's tables, bit by bit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import pytest
import torch

from dash_inductor.model import Band, Plan, Tiles
from dash_inductor.operators import attention as ops
from dash_inductor.schedule import NAMES, Problem, supports
from dash_inductor.schedule.jobs import scheduled_query_heads, tables
from dash_inductor.schedule.schedules import LEAST
from dash_inductor.schedule.tile_schedule import functions

from ...support.attention import Attention, Gradients
from ...support.calls import backward_spec
from ...support.cases import some

MASKS = [
    (Band(), 9, 14),
    (Band(0), 13, 13),
    (Band(0, None, "bottom_right"), 9, 14),
    (Band(0, 5), 15, 10),
    (Band(-4, 3, "bottom_right"), 9, 14),
    (Band(None, 2), 14, 9),
    (Band(-3), 9, 14),
]
TILES, DQ_TILES = Tiles(4, 3, 1, 1), Tiles(5, 4, 1, 1)
GROUPS = [(group, kv_heads) for group in range(1, 9) for kv_heads in range(1, 16 // group + 1)]


def random_problem(mask: Band, q_len: int, kv_len: int, kv_heads: int, group: int, batch: int = 1) -> Attention:
    return Attention.random(
        q_len, kv_len, 8, mask, batch=batch, kv_heads=kv_heads, group=group, device="cpu", dtype=torch.float32
    )


def executed(p: Attention, kernel: str, schedule: str) -> Gradients:
    """The operator's gradients, with an out and a log-sum-exp of no forward: the order of sums does not ask."""
    plan = Plan(kernel, schedule, "keep", TILES, DQ_TILES if schedule == "two_pass" else None)
    lse = torch.full(p.q.shape[:3], 2.0)
    gradients: Gradients = ops.attention_backward(
        p.do, p.q, p.k, p.v, p.do, lse, [], str(backward_spec(p.mask, p.scale)), str(plan), "test"
    )
    return gradients


@functools.cache
def visible(mask: Band, q_len: int, kv_len: int) -> torch.Tensor:
    return torch.tensor([[mask.visible(i, j, q_len, kv_len) for j in range(kv_len)] for i in range(q_len)])


class Tile:
    """p and ds of one tile pair of one query head, and its three products, each a matmul of two matrices."""

    def __init__(self, p: Attention, q_head: int, q: int, kv: int, block_q: int, block_kv: int) -> None:
        q_len, kv_len = p.q.shape[2], p.k.shape[2]
        rows = slice(q * block_q, min(q_len, (q + 1) * block_q))
        keys = slice(kv * block_kv, min(kv_len, (kv + 1) * block_kv))
        kv_head = q_head // p.group
        query, do = (t[0, q_head, rows].contiguous() for t in (p.q, p.do))
        key, value = (t[0, kv_head, keys].contiguous() for t in (p.k, p.v))
        keep = visible(p.mask, q_len, kv_len)[rows, keys]
        probabilities = torch.where(keep, torch.exp((query @ key.T) * p.scale - 2.0), 0.0)
        ds = torch.where(keep, probabilities * (do @ value.T - (do * do).sum(-1, keepdim=True)), 0.0)
        self.rows, self.keys = rows, keys
        self.dq, self.dk, self.dv = ds @ key, ds.T @ query, probabilities.T @ do


def tile_schedules(
    p: Attention, kernel: str, schedule: str
) -> Iterator[tuple[int, int, int, tuple[tuple[int, int], ...]]]:
    """(query head, kv head, kv tile, steps) of every tile schedule; tile schedules of one kv tile in the order of a
    group's members.
    """
    kv_heads, group = p.k.shape[1], p.group
    heads = kv_heads * group if kernel == "hopper" else kv_heads
    problem = Problem(p.mask, p.q.shape[2], p.k.shape[2], TILES.block_q, TILES.block_kv, heads=heads)
    columns = {(job.head, column.kv): column.steps for job in tables(schedule, problem) for column in job.columns}
    for member, kv_head, kv in itertools.product(range(group), range(kv_heads), range(problem.n_kv)):
        head = member * kv_heads + kv_head if kernel == "hopper" else kv_head
        yield kv_head * group + member, kv_head, kv, columns[head, kv]


def direct(p: Attention, kernel: str, schedule: str) -> Gradients:
    """The gradients as plain sums: dq by rank, dk and dv tile schedule by tile schedule."""
    dq, dk, dv = (torch.zeros(t.shape) for t in (p.q, p.k, p.v))
    added: dict[tuple[int, int], list[tuple[int, Tile]]] = {}
    for q_head, kv_head, kv, steps in tile_schedules(p, kernel, schedule):
        target = [dk[0, kv_head], dv[0, kv_head]]
        # a member of a group has sums of its own on the Hopper kernel; elsewhere one tile schedule goes on where the
        # last ended
        sums = [torch.zeros_like(t) for t in target] if kernel == "hopper" else target
        for q, rank in steps:
            tile = Tile(p, q_head, q, kv, TILES.block_q, TILES.block_kv)
            sums[0][tile.keys] += tile.dk
            sums[1][tile.keys] += tile.dv
            added.setdefault((q_head, q), []).append((rank, tile))
        if kernel == "hopper":
            for t, own in zip(target, sums, strict=True):
                t += own
    if schedule == "two_pass":
        added = of_q_tiles(p)
    for (q_head, _), tiles in added.items():
        for _, tile in sorted(tiles, key=lambda ranked: ranked[0]):
            dq[0, q_head, tile.rows] += tile.dq
    return dq * p.scale, dk * p.scale, dv


def of_q_tiles(p: Attention) -> dict[tuple[int, int], list[tuple[int, Tile]]]:
    """The terms that the dq kernel of two passes adds, its kv tiles in ascending order."""
    q_len, kv_len, blocks = p.q.shape[2], p.k.shape[2], (DQ_TILES.block_q, DQ_TILES.block_kv)
    problem = Problem(p.mask, q_len, kv_len, *blocks)
    kv_range, tail = functions("two_pass", problem).dash_kv_range, problem.tail()
    added = {}
    for q_head, q in itertools.product(range(p.q.shape[1]), range(problem.n_q)):
        first, _, _, end = kv_range(q, *tail)
        added[q_head, q] = [(kv, Tile(p, q_head, q, kv, *blocks)) for kv in range(first, end)]
    return added


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("kernel", ["reference", "hopper"])
def test_bits_are_those_of_the_tables(kernel: str, schedule: str) -> None:
    """1 to 16 query heads in groups of 1 to 8, masks by turns."""
    masks = itertools.cycle([mask for mask in MASKS if supports(schedule, mask[0]) is None])
    for group, kv_heads in GROUPS:
        mask = next(masks)
        p = random_problem(*mask, kv_heads, group)
        pairs = zip(executed(p, kernel, schedule), direct(p, kernel, schedule), strict=True)
        assert [torch.equal(a, b) for a, b in pairs] == [True] * 3, (mask, f"{kv_heads} groups of {group}")


@some([Band(0), Band(-30)], [Band(0)], "mask")
@pytest.mark.parametrize("kernel", ["reference", "hopper"])
def test_bits_of_bent_tile_schedules_are_those_of_the_tables(kernel: str, mask: Band) -> None:
    """With enough q tiles; `spt`, whose tile schedules are straight, has other bits."""
    p = random_problem(mask, LEAST * TILES.block_q + 9, 200, 2, 2)
    found = executed(p, kernel, "bent_fold")
    pairs = zip(found, direct(p, kernel, "bent_fold"), strict=True)
    assert [torch.equal(a, b) for a, b in pairs] == [True] * 3
    others = zip(found, executed(p, kernel, "spt"), strict=True)
    assert [torch.equal(a, b) for a, b in others] == [False] * 3


def test_query_heads_of_the_schedule() -> None:
    assert scheduled_query_heads(True, 6, 2) == ((0,), (3,), (1,), (4,), (2,), (5,))
    assert scheduled_query_heads(False, 6, 2) == ((0, 1, 2), (3, 4, 5))


@pytest.mark.parametrize(
    ("schedule", "mask", "q_len"), [("spt", Band(0, 5), 15), ("bent_fold", Band(0), LEAST * TILES.block_q)]
)
def test_neighbours_and_strides_change_no_bit(schedule: str, mask: Band, q_len: int) -> None:
    """A batch element alone, and the same values in another layout, have the same gradients."""
    p = random_problem(mask, q_len, 10, 3, 2, batch=5)
    everything = executed(p, "hopper", schedule)
    for b in range(5):
        q, k, v, do = (t[b : b + 1].contiguous() for t in (p.q, p.k, p.v, p.do))
        alone = executed(Attention(q, k, v, do, p.mask, p.scale), "hopper", schedule)
        assert all(torch.equal(x[b : b + 1], y) for x, y in zip(everything, alone, strict=True))
