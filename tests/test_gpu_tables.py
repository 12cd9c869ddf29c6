"""The kernels that build tables from the data of a mask, on a GPU: the words of their definition, every time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from dash_inductor.kernels import mask_tables, reference_tables
from dash_inductor.kernels.mask_data import MaskData, MaskTables

from dash_inductor.model.mask import Band
from dash_inductor.model.plan import Plan, Tiles

from .support.table_words import data_of, plan_of, same_tables
from .support.tile_pairs import random_mask

pytestmark = pytest.mark.gpu

PLAN = Plan("hopper", "fold", "hopper", Tiles(64, 128, 8, 2), forward_tiles=Tiles(128, 128, 8, 2))


@pytest.mark.parametrize("dense", [False, True], ids=["vectors", "dense"])
@pytest.mark.parametrize("seed", range(8))
def test_random_masks(seed: int, dense: bool) -> None:
    """Lengths up to 600, tiles of any size."""
    rng = random.Random(seed)
    mask = random_mask(rng, rng.choice((60, 600)), batch=2)
    data = data_of(mask, rng, "cuda", dense=dense)
    for _ in range(2):
        plan = plan_of(rng, data.band, None, mask_tables.ROW_BLOCK)
        same_tables(mask_tables.build(data, plan), defined(data, plan))


def defined(data: MaskData, plan: Plan) -> MaskTables:
    """The tables by their definition, computed on the CPU."""
    valid, dense = (None if t is None else t.cpu() for t in (data.valid, data.dense))
    segments = None if data.segments is None else (data.segments[0].cpu(), data.segments[1].cpu())
    found = reference_tables.build(replace(data, valid=valid, segments=segments, dense=dense), plan)
    return MaskTables(*(t.cuda() for t in found))


def packed(length: int, documents: int) -> MaskData:
    """Causal documents, and a batch element of one giant and many small ones."""
    generator = torch.Generator().manual_seed(length)
    cuts = torch.randperm(length, generator=generator)[: documents - 1]
    starts = torch.zeros(2, length, dtype=torch.int64)
    starts[0, cuts], starts[1, cuts[cuts > length // 2]] = 1, 1
    ids = starts.cumsum(1).cuda()
    return MaskData(Band(0), 2, 4, 2, length, length, segments=(ids, ids))


def test_long_packed_documents() -> None:
    """4096 tokens: walks of many steps, and every loop of the kernels has several turns."""
    data = packed(4096, 16)
    same_tables(mask_tables.build(data, PLAN), defined(data, PLAN))


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_same_words_every_time(deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    data = packed(32768, 16)

    def words() -> MaskTables:
        return mask_tables.build(data, PLAN)

    first = words()
    for _ in range(20):
        same_tables(words(), first)
