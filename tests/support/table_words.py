"""Masks that are data as tensors, and tables against tables, word by word."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dash_inductor.kernels.common import document_tiles as work_lists
from dash_inductor.kernels.common import mask_tables
from dash_inductor.kernels.common.mask_data import MaskData, MaskTables
from dash_inductor.kernels.reference import tables as reference_tables
from dash_inductor.model.components import Component, Dense, Dilated, HeadInterval, Interval, Keys, Segments
from dash_inductor.model.mask import ALIGNMENT, ROW_BLOCK, Band
from dash_inductor.model.plan import Plan, Tiles
from dash_inductor.schedule.schedules import define, supports
from dash_inductor.schedule.table_tile_schedule import TILE_BITS

from .tile_pairs import PairMask
from .varlen_layout import Rows, mask_of

SCHEDULES = ("ascending", "descending", "spt", "bent_fold")
"""The schedules whose CTAs only wait for earlier ones."""


Values = tuple[tuple[type[Component], dict[str, Tensor]], ...]


def values_of(
    valid: Tensor | None = None,
    segments: tuple[Tensor, Tensor] | None = None,
    dense: Tensor | None = None,
    interval: tuple[Tensor | None, ...] | None = None,
    dilated: tuple[Tensor, Tensor] | None = None,
    head_interval: tuple[Tensor | None, Tensor | None] | None = None,
) -> Values:
    """The values of a `MaskData` by the operands of its components."""
    operands: dict[type[Component], tuple[Tensor | None, ...] | None] = {
        Segments: segments, Keys: None if valid is None else (valid,), Dense: None if dense is None else (dense,),
        Interval: interval, HeadInterval: head_interval, Dilated: dilated,
    }  # fmt: skip
    return tuple(
        (kind, {name: value for name, value in zip(kind.ROLES, values, strict=True) if value is not None})
        for kind, values in operands.items()
        if values is not None
    )


def with_values(data: MaskData, **operands: Any) -> MaskData:
    """The data with other operands of some components, by the parameters of `values_of`."""
    known = {kind: tuple(map(values.get, kind.ROLES)) for kind, values in data.values}
    found: dict[str, Any] = {
        "segments": known.get(Segments), "interval": known.get(Interval),
        "valid": known[Keys][0] if Keys in known else None, "dense": known[Dense][0] if Dense in known else None,
        "dilated": known.get(Dilated), "head_interval": known.get(HeadInterval),
    } | operands  # fmt: skip
    return replace(data, values=values_of(**found))


def operand(data: MaskData, kind: type[Component], name: str) -> Tensor | None:
    """An operand of a component; None where there is none."""
    return dict(data.values).get(kind, {}).get(name)


def data_of(mask: PairMask, rng: random.Random, device: str = "cpu", *, dense: bool = False) -> MaskData:
    """The mask's data as tensors, of any dtype that holds them and any strides; and any numbers of heads.

    dense: with a dense mask beside the vectors, or, one time in three, in their place.
    """

    def strided(tensor: Tensor) -> Tensor:
        how = rng.randrange(3)
        if how == 1:
            return tensor.mT.contiguous().mT
        if how == 2:
            wide = tensor.new_ones(*tensor.shape[:-1], 2 * tensor.shape[-1] + 3)
            wide[..., 1 : 2 * tensor.shape[-1] : 2] = tensor
            return wide[..., 1 : 2 * tensor.shape[-1] : 2]
        return tensor

    def tensor(rows: list[list[int]] | list[list[bool]], dtypes: list[torch.dtype]) -> Tensor:
        return strided(torch.tensor(rows, dtype=rng.choice(dtypes), device=device))

    kv_heads, group = rng.choice((1, 2)), rng.choice((1, 2, 3))
    valid = None if mask.valid is None else tensor(mask.valid, [torch.bool, torch.uint8])
    fits = mask.segments is None or all(-(2**31) <= i < 2**31 for side in mask.segments for row in side for i in row)
    ids = [torch.int32, torch.int64] if fits else [torch.int64]
    segments = None if mask.segments is None else (tensor(mask.segments[0], ids), tensor(mask.segments[1], ids))
    shown = None
    if dense:
        sizes = (mask.batch, kv_heads * group, mask.q_len, mask.kv_len)
        shape = [rng.choice((1, size)) if d < 2 else size for d, size in enumerate(sizes)]
        if rng.random() < 0.2:
            shape[rng.choice((2, 3))] = 1
        shown = strided(
            torch.tensor([rng.random() < 0.7 for _ in range(torch.Size(shape).numel())], device=device).view(shape)
        )
        if rng.random() < 1 / 3:
            valid = segments = None
    values = values_of(valid, segments, shown)
    return MaskData(mask.band, mask.batch, kv_heads * group, kv_heads, mask.q_len, mask.kv_len, values)


def interval_of(rng: random.Random, data: MaskData) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Bounds that begin anywhere, or with documents and their ends; of positions, or of a few numbers of keys."""
    numbered = rng.random() < 0.4
    dtype = rng.choice((torch.int32, torch.int64))

    def vector(length: int, least: int, most: int) -> Tensor:
        values = [[rng.randint(least, most) for _ in range(length)] for _ in range(data.batch)]
        found = torch.tensor(values, dtype=dtype)
        return found.sort(1).values if rng.random() < 0.5 else found

    most = 6 if numbered else data.kv_len + 2
    lo = vector(data.q_len, -2, most)
    hi = lo + vector(data.q_len, -2, most) if rng.random() < 0.5 else vector(data.q_len, -2, most)
    sides = rng.choice(((lo, None), (None, hi), (lo, hi)))
    return *sides, vector(data.kv_len, -1, 5) if numbered else None


def head_interval_of(rng: random.Random, data: MaskData) -> tuple[Tensor | None, Tensor | None]:
    """Bounds of positions that begin anywhere, by head; they may broadcast along any dimension but one."""
    dtype, plane = rng.choice((torch.int32, torch.int64)), (data.batch, data.q_heads, data.q_len)

    def bounds() -> Tensor:
        sizes = [rng.choice((1, size)) for size in plane]
        found = torch.tensor([rng.randint(-2, data.kv_len + 2) for _ in range(math.prod(sizes))], dtype=dtype)
        found = found.reshape(sizes).sort(2).values if rng.random() < 0.5 else found.reshape(sizes)
        return (found.mT.contiguous().mT if rng.random() < 0.5 else found).unsqueeze(3)

    return rng.choice(((bounds(), None), (None, bounds()), (bounds(), bounds())))


def dilation_of(rng: random.Random, data: MaskData) -> tuple[Tensor, Tensor]:
    """Numbers and steps of queries: positions from an offset on with one step, or any numbers and steps."""
    steps, dtype = (1, 2, 3, 64, 100, data.q_len + data.kv_len, 2**40), rng.choice((torch.int32, torch.int64))
    size = data.batch, data.q_len
    if rng.random() < 0.5:
        step = torch.full(size, rng.choice(steps[:-1] if dtype == torch.int32 else steps))
        return (torch.arange(data.q_len) + rng.randint(-50, 50)).to(dtype).expand(size), step.to(dtype)
    few, generator = torch.tensor([-3, 0, *steps]), torch.Generator().manual_seed(rng.randrange(2**30))
    step = few[torch.randint(0, len(few) - rng.choice((0, 4)), size, generator=generator)]
    return torch.randint(-200, 200, size, generator=generator).to(dtype), step


def same_work_lists(rng: random.Random, device: str = "cpu") -> None:
    """The work list that kernels build for random packed documents is that of the definition."""
    count = rng.choice((0, 1, 3, 20))
    lengths = tuple(rng.choice((0, 1, 63, 64, 128, 129, rng.randrange(700))) for _ in range(count))
    rows = Rows((*lengths, 1), rng.choice((0, 1, 150)))
    band = rng.choice((Band(), Band(0), Band(0, 99), Band(-70, 300), Band(None, 10), Band(30, 40)))
    queries, keys, *places = rows.operands(device)
    dtype, step = rng.choice((torch.int32, torch.int64)), rng.choice((1, 2))
    ids = [side.to(dtype).repeat_interleave(step, 1)[:, ::step] for side in (queries, keys)]
    tiles = Tiles(ROW_BLOCK * rng.choice((2, 3)), rng.choice((64, 128)), 8, 2)
    found, expected = (make(mask_of(band), [*ids, *places], tiles) for make in (work_lists.build, work_lists.reference))
    used = 1 + int(expected[0, 0])
    assert found.shape == expected.shape == work_lists.size(rows.rows)
    assert torch.equal(found[:used], expected[:used]), (rows, band)


def same_document_tables(rng: random.Random, alignment: int = ALIGNMENT, device: str = "cpu") -> None:
    """The tables that kernels build for random packed documents are those of the definition."""
    edges = (0, 1, alignment - 1, alignment, alignment + 1, rng.randrange(5 * alignment))
    lengths = tuple(rng.choice(edges) for _ in range(rng.choice((0, 1, 3, 9))))
    rows = Rows((*lengths, 1), rng.choice((0, 1, alignment + 3)), alignment // 2, alignment)
    lo, hi = rng.choice((None, 0, -rng.randrange(3 * alignment))), rng.choice((None, rng.randrange(3 * alignment)))
    band = Band(lo, hi, "top_left" if lo is None and hi is None else rng.choice(("top_left", "bottom_right")))
    dtype, step = rng.choice((torch.int32, torch.int64)), rng.choice((1, 2))
    queries, keys, *places = rows.operands()
    ids = [side.to(dtype).repeat_interleave(step, 1)[:, ::step] for side in (queries, keys)]
    sizes = 1, 4, 2, rows.rows, rows.rows
    blocks = [alignment >> i for i in range(3)]
    schedule = rng.choice([name for name in SCHEDULES if supports(name, band) is None])
    tiles = Tiles(rng.choice(blocks), rng.choice(blocks), 8, 2)
    plan = Plan("hopper", schedule, "hopper", tiles, forward_tiles=Tiles(2 * ROW_BLOCK, alignment, 8, 2))
    on_device, defined = (
        MaskData.of(mask_of(band), [t.to(of) for t in (*ids, *places)], sizes) for of in (device, "cpu")
    )
    found = MaskTables(*(t.cpu() for t in mask_tables.build(on_device, plan)))
    same_tables(found, reference_tables.build(defined, plan))


BATCHES = ("documents", "one document", "ids that return", "single tokens", "short documents")
OTHERS = ("any numbers", "numbers of other tokens")
"""Further batch elements of numbers that are not those of segment ids."""


def documents_of_masks(rng: random.Random, kinds: Sequence[str], length: int) -> Tensor:
    """The numbers of a batch element of each kind (Note [Documents of a mask]), int32 [batch, length]: of segment ids
    the first token with the same id.
    """
    found = []
    for kind in kinds:
        lengths = {"one document": [length], "single tokens": [1] * length}.get(kind)
        while lengths is None or sum(lengths) < length:
            most = 20 if kind == "short documents" else 700
            lengths = [*(lengths or []), rng.choice((1, 63, 64, 65, 128, 129, rng.randrange(1, 700)))]
            lengths[-1] = min(lengths[-1], most)
        numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[:length]
        if kind == "ids that return":
            numbers = numbers % rng.choice((2, 3))
        first = (numbers == numbers[:, None]).int().argmax(1)
        if kind in OTHERS:
            first = first - 1 if kind == "any numbers" else torch.roll(first, 1)
        found.append(first)
    return torch.stack(found).int()


def same_work_lists_of_masks(rng: random.Random, device: str = "cpu", length: int = 700) -> None:
    """The work list that kernels build for the documents of a mask is that of the definition."""
    band = rng.choice((Band(), Band(0), Band(0, 99), Band(-70, 300), Band(None, 10), Band(0, None, "bottom_right")))
    kinds = [rng.choice(BATCHES + OTHERS) for _ in range(rng.choice((1, 3, 9)))]
    ids = documents_of_masks(rng, kinds, rng.choice((1, 64, 129, rng.randrange(1, length)))).to(device)
    step = rng.choice((1, 2))
    ids = ids.to(rng.choice((torch.int32, torch.int64))).repeat_interleave(step, 1)[:, ::step]
    if ids.dtype == torch.int64 and rng.random() < 0.3:
        ids = ids + (1 << 32)  # no tokens, although their lower halves are
    tiles = Tiles(ROW_BLOCK * rng.choice((2, 3)), rng.choice((64, 128)), 8, 2)
    made = [make(ids, band, tiles) for make in (work_lists.build_by_mask, work_lists.reference_by_mask)]
    for found, expected in zip(*made, strict=True):
        used = 1 + int(expected.flatten()[0])
        assert found.shape == expected.shape
        assert torch.equal(found[:used], expected[:used]), (kinds, ids.shape, band, tiles)


def plan_of(rng: random.Random, band: Band, schedule: str | None, row_block: int, *, of_bits: bool = False) -> Plan:
    """A plan of the Hopper kernels with any tiles and, unless one is given, any schedule that such a mask may have."""
    able = [name for name in SCHEDULES if supports(name, band) is None]
    schedule = schedule or rng.choice(able)
    assert define(schedule, band).resident is None
    tiles = Tiles(rng.choice((1, 4, 8)), rng.choice((2, 4, 16)), 8, 2)
    if of_bits:  # words have a bit for each score of a thread
        warps = rng.choice((1, 2, 4))
        rows = 16 * rng.choice([n for n in (1, 2, 4) if n <= warps])
        tiles = Tiles(rng.choice([n for n in (16, 32, 64) if n * rows >= 128 * warps]), rows, warps, 2)
    forward = Tiles(row_block * rng.choice((2, 3)), rng.choice((4, 8) if row_block < 16 else (8, 32, 128)), 8, 2)
    return Plan("hopper", schedule, "hopper", tiles, forward_tiles=forward)


def same_tables(found: MaskTables, expected: MaskTables) -> None:
    """Every word that a kernel may read."""
    for name in ("q_vectors", "kv_vectors", "keys_seen", "counts", "visits", "contributions", "seen_bits"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for name, lengths in (("row_steps", found.counts), ("steps", found.visits)):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.shape == theirs.shape, name
        if not ours.numel():  # as without a backward
            continue
        used = torch.arange(ours.shape[2], device=ours.device) < lengths[:, :, None]
        assert torch.equal(ours[used], theirs[used]), name
    if found.backward_bits.numel():
        cut = used & (expected.steps >> 2 * TILE_BITS & 1 != 0)
        q_tiles = (expected.steps & ((1 << TILE_BITS) - 1)).long()
        table, kv, _ = (places := cut.nonzero()).unbind(1)
        pairs = table, kv, q_tiles[places.unbind(1)]
        assert torch.equal(found.backward_bits[pairs], expected.backward_bits[pairs]), "backward_bits"
