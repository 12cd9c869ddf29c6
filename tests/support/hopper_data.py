"""Masks that are data for tests of the Hopper backward: segment ids, tables in Python, and a batch of every kind."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dash_inductor.kernels.hopper.backward.build import WARPS
from dash_inductor.kernels.hopper.backward.data import BackwardData
from dash_inductor.kernels.reference.tables import backward_bits_of
from dash_inductor.model import Band
from dash_inductor.schedule.table_tile_schedule import packed_tile
from dash_inductor.schedule.tile_schedule import ClosedForm
from dash_inductor.schedule.visibility import EMPTY, FULL, PARTIAL, Pairs

NO_KEY, NO_QUERY = -2, -1
"""The code of a query that sees no key, and of a key that is not valid."""


@dataclass(frozen=True)
class VisibleTileSchedule:
    """The tile schedule of a closed form, the same for every head, restricted to the visible pairs of one table.

    Args:
        closed: the tile schedule of the band.
        pairs: of the table.
        blind: the q tiles with a query that sees no key.
    """

    closed: ClosedForm
    pairs: Pairs
    blind: Collection[int] = ()

    def q_tiles(self, kv: int) -> list[int]:
        """The q tiles that kv tile `kv` visits, in this order."""
        steps = range(self.closed.visits(0, kv))
        tiles = [self.closed.q_tile(0, kv, step) for step in steps]
        return [q for q in tiles if self.pairs[q][kv] != EMPTY]

    def contributors(self, q: int) -> list[int]:
        """The kv tiles that add to q tile `q`, in this order."""
        kvs = [kv for kv in self.closed.visible(0, q) if self.pairs[q][kv] != EMPTY]
        return sorted(kvs, key=lambda kv: self.closed.rank(0, q, kv))

    def packed_tiles(self, kv: int) -> list[int]:
        """The steps of kv tile `kv` as the kernel reads them."""
        tiles = self.q_tiles(kv)
        return [
            packed_tile(q, self.contributors(q).index(kv), self.pairs[q][kv] != FULL, q in self.blind) for q in tiles
        ]


def tables(tile_schedules: Sequence[VisibleTileSchedule]) -> tuple[Tensor, Tensor, Tensor]:
    """(visits, steps, contributions); what no tile schedule reads is -1."""
    n_q, n_kv = len(tile_schedules[0].pairs), len(tile_schedules[0].pairs[0])
    visits = torch.zeros(len(tile_schedules), n_kv, dtype=torch.int32)
    steps = torch.full((len(tile_schedules), n_kv, n_q), -1, dtype=torch.int32)
    contributions = torch.zeros(len(tile_schedules), n_q, dtype=torch.int32)
    for table, tile_schedule in enumerate(tile_schedules):
        for kv in range(n_kv):
            packed_tiles = tile_schedule.packed_tiles(kv)
            visits[table, kv] = len(packed_tiles)
            steps[table, kv, : len(packed_tiles)] = torch.tensor(packed_tiles, dtype=torch.int32)
        contributions[table] = torch.tensor([len(tile_schedule.contributors(q)) for q in range(n_q)])
    return visits, steps, contributions


def tile_pairs(keep: Tensor, block_q: int, block_kv: int) -> list[Pairs]:
    """The tile pairs of every [q_len, kv_len] mask of `keep` [masks, q_len, kv_len], by `schedule.visibility`."""
    q_len, kv_len = keep.shape[1:]
    rows, keys = -q_len % block_q, -kv_len % block_kv
    some = torch.nn.functional.pad(keep, (0, keys, 0, rows), value=False)
    every = torch.nn.functional.pad(torch.nn.functional.pad(keep, (0, keys)), (0, 0, 0, rows), value=True)
    some, every = (t.unflatten(2, (-1, block_kv)).unflatten(1, (-1, block_q)) for t in (some, every))
    kinds = torch.where(every.all(4).all(2), FULL, torch.where(some.any(4).any(2), PARTIAL, EMPTY))
    found: list[Pairs] = kinds.tolist()
    return found


def data_of(
    closed: ClosedForm, keep: Tensor, segment_ids: tuple[Tensor, Tensor] | None, dense: Tensor | None
) -> BackwardData:
    """Operands and tables of a mask.

    Args:
        closed: of the band.
        keep: bool [batch, 1 or q heads, q_len, kv_len], the whole mask.
    """
    p = closed.problem
    of_tables = keep if dense is not None and dense.shape[1] > 1 else keep[:, :1]
    masks = of_tables.flatten(0, 1)
    pairs = tile_pairs(masks, p.block_q, p.block_kv)
    blind = [{q for q, rows in enumerate(mask.any(1).split(p.block_q)) if not rows.all()} for mask in masks]
    tile_schedules = [VisibleTileSchedule(closed, *element) for element in zip(pairs, blind, strict=True)]
    made = [t.to(keep.device) for t in tables(tile_schedules)]
    keys_seen = of_tables.any(2)
    if dense is not None:
        return BackwardData(None, None, keys_seen, *made, backward_bits_of(of_tables, p, WARPS))
    vectors = (None, None) if segment_ids is None else (segment_ids[0][:, None], segment_ids[1][:, None])
    return BackwardData(*vectors, keys_seen, *made)


KINDS = (
    "ones", "right padding", "left padding", "holes", "packed", "repeated ids", "nobody", "packed and padded",
    "one key",
)  # fmt: skip


def segment_ids_of(
    band: Band, q_len: int, kv_len: int, kinds: Sequence[str] = KINDS, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """(q_segment_ids, kv_segment_ids), a batch element of each kind; queries that see no key have `NO_KEY`."""
    rng = random.Random(seed)
    length = max(q_len, kv_len)
    keep = band_of(band, q_len, kv_len)
    q_rows, kv_rows = [], []
    for kind in kinds:
        ids = torch.zeros(length, dtype=torch.int32)
        if "packed" in kind:
            for border in rng.sample(range(length), min(length, 5)):
                ids[border:] += 1
        if kind == "repeated ids":
            run = max(1, length // 11)
            ids = torch.arange(length, dtype=torch.int32) // run % 3
        key = torch.arange(kv_len)
        valid = {
            "right padding": key < max(1, kv_len * 5 // 8), "left padding": key >= kv_len * 3 // 7,
            "holes": (key // 9 % 4 != 1) & ~((key > kv_len // 4) & (key < kv_len * 3 // 4)), "nobody": key < 0,
            "packed and padded": key < kv_len * 9 // 10, "one key": key == kv_len // 2,
        }.get(kind, key >= 0)  # fmt: skip
        kv_segment_ids = torch.where(valid, ids[:kv_len], NO_QUERY)
        sees = (keep & (ids[:q_len, None] == kv_segment_ids)).any(1)
        q_rows.append(torch.where(sees, ids[:q_len], NO_KEY))
        kv_rows.append(kv_segment_ids)
    return torch.stack(q_rows).to(torch.int32), torch.stack(kv_rows).to(torch.int32)


def band_of(band: Band, q_len: int, kv_len: int) -> Tensor:
    """The band as booleans [q_len, kv_len]."""
    band = band.resolve(q_len, kv_len)
    distance = torch.arange(q_len)[:, None] - torch.arange(kv_len)
    keep = torch.ones(q_len, kv_len, dtype=torch.bool)
    if band.lo is not None:
        keep &= distance >= band.lo
    if band.hi is not None:
        keep &= distance <= band.hi
    return keep


def keep_of(
    band: Band, segment_ids: tuple[Tensor, Tensor] | None, dense: Tensor | None, shape: Sequence[int]
) -> Tensor:
    """The whole mask, bool [batch, 1 or q heads, q_len, kv_len]; shape: (batch, q_len, kv_len)."""
    batch, q_len, kv_len = shape
    keep = band_of(band, q_len, kv_len).expand(batch, 1, -1, -1)
    if segment_ids is not None:
        keep = keep & (segment_ids[0][:, None, :, None] == segment_ids[1][:, None, None, :]).cpu()
    return keep if dense is None else keep & dense.cpu()
