"""Run in Triton's interpreter: the tables that the kernels build against their definition, word by word.

Usage: ``python -m tests.interpreted.tables KIND COUNT ...``, with kinds of `KINDS`; prints what was compared.
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import replace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported

import torch
import triton
import triton.language as tl

from dash_inductor.kernels.common import document_tiles, mask_tables
from dash_inductor.kernels.common.device.relations.form import Side
from dash_inductor.kernels.common.launch_list import Notes
from dash_inductor.kernels.common.mask_data import MaskData
from dash_inductor.kernels.common.relations import vectors as vectors_of
from dash_inductor.kernels.reference import tables as reference_tables
from dash_inductor.model.components import Keys
from dash_inductor.model.mask import Band
from dash_inductor.schedule.schedules import LEAST

from ..support.table_words import (
    data_of,
    dilation_of,
    head_interval_of,
    interval_of,
    operand,
    plan_of,
    same_document_tables,
    same_tables,
    same_work_lists,
    same_work_lists_of_masks,
    with_values,
)
from ..support.tile_pairs import PairMask, random_mask


def compare(rng: random.Random, data: MaskData, schedule: str | None = None, block_q: int | None = None) -> None:
    """Under tiles and blocks of any size, unless q tiles of the backward have a given one."""
    mask_tables.ROW_BLOCK = rng.choice((4, 8) if data.dense is None else (16, 64))  # bits are of 16 rows
    mask_tables.TOKENS, mask_tables.PARTNERS = rng.choice(((4, 4), (32, 8)))
    mask_tables.TOKEN_TILES, mask_tables.LINES = rng.choice((1, 4, 32)), rng.choice((1, 2, 8))
    for name in ("Q_TILES", "KV_TILES", "DENSE_Q_TILES", "DENSE_KV_TILES", "ROWS", "COLUMNS"):
        setattr(mask_tables, name, rng.choice((1, 4, 32)))
    plan = plan_of(rng, data.band, schedule, mask_tables.ROW_BLOCK, of_bits=data.dense is not None)
    plan = replace(plan, dkdv=replace(plan.dkdv, block_q=block_q or plan.dkdv.block_q))
    has_backward = rng.random() < 0.7
    same_tables(mask_tables.build(data, plan, has_backward), reference_tables.build(data, plan, has_backward))


def vectors(rng: random.Random) -> None:
    compare(rng, data_of(random_mask(rng, 50), rng))


def intervals(rng: random.Random) -> None:
    """Intervals of positions or of other numbers of keys, alone or beside vectors."""
    mask = random_mask(rng, 40)
    data = data_of(mask, rng)
    alone = {"valid": None, "segments": None} if rng.random() < 0.5 else {}
    compare(rng, with_values(data, interval=interval_of(rng, data), **alone))


def head_intervals(rng: random.Random) -> None:
    """Intervals of positions by head, alone or beside vectors."""
    data = data_of(random_mask(rng, 40), rng)
    alone = {"valid": None, "segments": None} if rng.random() < 0.5 else {}
    compare(rng, with_values(data, head_interval=head_interval_of(rng, data), **alone))


def dilations(rng: random.Random) -> None:
    """Dilations, alone or beside an interval or vectors."""
    data = data_of(random_mask(rng, 40), rng)
    beside: dict[str, Any] = {"dilated": dilation_of(rng, data)}
    if rng.random() < 0.5:
        beside["interval"] = interval_of(rng, data)
    alone = {"valid": None, "segments": None} if rng.random() < 0.6 else {}
    compare(rng, with_values(data, **alone | beside))


def documents(rng: random.Random) -> None:
    """Work lists of packed documents."""
    document_tiles.SLOTS = rng.choice((1, 4, 64))
    same_work_lists(rng)


def packed_documents(rng: random.Random) -> None:
    """The backward's tables of packed documents."""
    mask_tables.ALIGNMENT = rng.choice((8, 16, 128))
    mask_tables.SLOTS, mask_tables.COLUMNS = rng.choice((1, 4, 64)), rng.choice((1, 4, 32))
    same_document_tables(rng, mask_tables.ALIGNMENT)


def documents_of_masks(rng: random.Random) -> None:
    """Work lists of the documents of segment ids."""
    document_tiles.SLOTS, document_tiles.TOKENS = rng.choice((1, 4, 64)), rng.choice((4, 64, 1024))
    same_work_lists_of_masks(rng)


@triton.jit
def classify(
    Q_VECTORS, KV_VECTORS, FOUND, q_len, kv_len, FORM: tl.constexpr, Q_TILES: tl.constexpr, KV_TILES: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """FOUND: int32 [3, KV_TILES, Q_TILES], what the form says of tile pairs."""
    rows = tl.arange(0, Q_TILES)[:, None] * BLOCK_Q + tl.arange(0, BLOCK_Q)[None, :]
    columns = tl.arange(0, KV_TILES)[:, None] * BLOCK_KV + tl.arange(0, BLOCK_KV)[None, :]
    queries = FORM.load_queries(Side(Q_VECTORS, q_len), 0, rows, rows < q_len)
    keys = FORM.load_keys(Side(KV_VECTORS, kv_len), 0, columns, columns < kv_len)
    found = FORM.classify(queries, rows < q_len, keys, columns < kv_len)
    pairs = tl.arange(0, KV_TILES)[:, None] * Q_TILES + tl.arange(0, Q_TILES)[None, :]
    for i in tl.static_range(3):
        tl.store(FOUND + i * KV_TILES * Q_TILES + pairs, found[i].to(tl.int32))


def verdicts(rng: random.Random) -> None:
    """What forms say of tile pairs: exact for positions of keys, true for others."""
    data = data_of(random_mask(rng, 60, batch=1), rng)
    alone = {"valid": None, "segments": None, "dense": None}
    beside = {"dilated": dilation_of(rng, data)} if rng.random() < 0.7 else {"interval": interval_of(rng, data)}
    data = replace(with_values(data, **alone, **beside), band=Band())
    (of,), shown = vectors_of(data), reference_tables._shown(data)[0, 0]
    queries, keys = (side.contiguous() for side in of.form.vectors(of, data))
    block_q, block_kv = rng.choice((1, 4, 16)), rng.choice((2, 4, 16))
    sizes = zip(shown.shape, (block_q, block_kv), strict=True)
    tiles = [2 ** (-(-length // block) - 1).bit_length() for length, block in sizes]
    found = torch.empty(3, tiles[1], tiles[0], dtype=torch.int32)
    classify[(1,)](queries, keys, found, *shown.shape, of.form, *tiles, block_q, block_kv)
    for q, rows in enumerate(shown.split(block_q)):
        for kv, pairs in enumerate(rows.split(block_kv, dim=1)):
            none, every, some = map(bool, found[:, kv, q])
            assert not (none if pairs.any() else some), (q, kv)
            if of.form.reads_positions:
                assert (none, some) == (not pairs.any(), bool(pairs.any())), (q, kv)
            if pairs.shape[1] == block_kv:
                assert every == bool(pairs.all()) if of.form.reads_positions else pairs.all() or not every, (q, kv)


def dense(rng: random.Random) -> None:
    """A dense mask, alone or beside vectors, that broadcasts in any way."""
    mask = random_mask(rng, 30, batch=rng.choice((1, 2)))
    compare(rng, data_of(mask, rng, dense=True))


def seen_bits(rng: random.Random) -> None:
    """The bits of a dense mask and the kinds of its tile pairs, for several row blocks and kv tiles, empty ones too."""
    mask = random_mask(rng, 200, batch=rng.choice((1, 2)))
    data = data_of(mask, rng, dense=True)
    assert data.dense is not None
    cut = torch.arange(mask.kv_len) < rng.choice((8, 70, 300))
    data = with_values(data, dense=data.dense & cut if rng.random() < 0.5 else data.dense | cut)
    mask_tables.ROW_BLOCK = rng.choice((16, 64))
    plan = plan_of(rng, data.band, None, mask_tables.ROW_BLOCK)
    kinds, found = mask_tables._Builder(data, plan, Notes([]))._seen_bits(*reference_tables._vectors(data))
    shape, shown = mask_tables.Shape.of(data, plan), reference_tables._shown(data)
    assert torch.equal(found, reference_tables._seen_bits(shape, shown))
    expected = reference_tables.tile_kinds(shown, shape.forward.block_q, shape.forward.block_kv)
    assert torch.equal(kinds.mT.int(), torch.tensor(expected, dtype=torch.int32))


def united(rng: random.Random) -> None:
    """Kinds of a backward's tile pairs, of which each is several of the forward's."""
    data = data_of(random_mask(rng, 150), rng)
    mask_tables.ROW_BLOCK, mask_tables.COLUMNS = rng.choice((4, 8)), rng.choice((1, 4, 32))
    plan = plan_of(rng, data.band, None, mask_tables.ROW_BLOCK)
    assert plan.forward_tiles is not None
    high, wide = rng.choice(((1, 2), (2, 1), (2, 2), (4, 2)))
    coarse = replace(plan.dkdv, block_q=high * mask_tables.ROW_BLOCK, block_kv=wide * plan.forward_tiles.block_kv)
    plan = replace(plan, dkdv=coarse)
    shape, shown = mask_tables.Shape.of(data, plan), reference_tables._shown(data)
    assert shape.finer == (high, wide)
    fine, expected = (
        torch.tensor(reference_tables.tile_kinds(shown, of.block_q, of.block_kv), dtype=torch.int8).mT.contiguous()
        for of in (shape.forward, shape.backward)
    )
    assert torch.equal(mask_tables._Builder(data, plan, Notes([]))._united(fine, high, wide), expected)


def bent(rng: random.Random) -> None:
    """Tile schedules that are long enough to be bent."""
    mask = random_mask(rng, 100)
    while mask.q_len < LEAST or mask.kv_len > 60:
        mask = random_mask(rng, 100)
    band = rng.choice((Band(), Band(0), Band(-20)))
    compare(rng, data_of(replace(mask, band=band), rng), "bent_fold", block_q=1)


def extreme(rng: random.Random) -> None:
    """Ids at the ends of 64 bits, of which the kernels keep none."""
    ids = [-(2**63), -(2**62) - 1, 2**62 + 1, 2**63 - 1, 0, -1, -2]
    q, kv = ([rng.choice(ids) for _ in range(rng.choice((1, 30)))] for _ in range(2))
    compare(rng, data_of(PairMask(Band(), len(q), len(kv), None, ([q], [kv])), rng))


def alone(rng: random.Random) -> None:
    """A batch element alone has the words that it has in a batch."""
    mask = random_mask(rng, 40)
    data = data_of(mask, random.Random(0))
    plan = plan_of(rng, mask.band, None, mask_tables.ROW_BLOCK)
    packed = mask_tables.build(data, plan)
    for b in range(mask.batch):
        values = tuple((kind, {name: t[b : b + 1] for name, t in values.items()}) for kind, values in data.values)
        single = mask_tables.build(replace(data, batch=1, values=values), plan)
        each = [len(t) // mask.batch if len(t) else 0 for t in packed]
        part = [t[b * n : (b + 1) * n] for t, n in zip(packed, each, strict=True)]
        same_tables(type(packed)(*part), single)


def altered(rng: random.Random) -> None:
    """Negative control: one key less is noticed."""
    mask = PairMask(Band(), 20, 30, [[True] * 30], None)
    data, plan = data_of(mask, random.Random(1)), plan_of(rng, Band(), "ascending", mask_tables.ROW_BLOCK)
    found = mask_tables.build(data, plan)
    valid = operand(data, Keys, "valid")
    assert valid is not None
    fewer = valid.clone()
    fewer[0, rng.randrange(30)] = 0
    try:
        same_tables(found, reference_tables.build(with_values(data, valid=fewer), plan))
    except AssertionError:
        return
    raise AssertionError("a mask with a key less has the same tables")


KINDS = {
    f.__name__: f
    for f in (
        vectors,
        intervals,
        head_intervals,
        dilations,
        documents,
        packed_documents,
        documents_of_masks,
        verdicts,
        dense,
        seen_bits,
        united,
        bent,
        extreme,
        alone,
        altered,
    )
}


def main(words: list[str]) -> None:
    torch.manual_seed(0)
    for kind, count in zip(words[::2], map(int, words[1::2]), strict=True):
        for seed in range(count):
            try:
                KINDS[kind](random.Random(f"{kind} {seed}"))
            except Exception as error:
                raise RuntimeError(f"{kind} {seed}") from error
        print(f"RESULT {kind} compared {count}")


if __name__ == "__main__":
    main(sys.argv[1:])
