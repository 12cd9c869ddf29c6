"""The kernels that build tables from the data of a mask, on a GPU: the words of their definition, every time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from dash_inductor.kernels.common import mask_tables
from dash_inductor.kernels.common.launch_list import LaunchLists
from dash_inductor.kernels.common.mask_data import MaskData, MaskTables
from dash_inductor.kernels.reference import tables as reference_tables
from dash_inductor.model.components import Segments
from dash_inductor.model.mask import Band, Mask
from dash_inductor.model.plan import Plan, Tiles
from dash_inductor.operators.mask_tables import mask_tables as operator

from ..support.table_words import (
    data_of,
    interval_of,
    plan_of,
    same_document_tables,
    same_tables,
    same_work_lists,
    values_of,
    with_values,
)  # fmt: skip
from ..support.tile_pairs import random_mask

pytestmark = pytest.mark.gpu

PLAN = Plan("hopper", "bent_fold", "hopper", Tiles(64, 128, 8, 2), forward_tiles=Tiles(128, 128, 8, 2))


@pytest.mark.parametrize("dense", [False, True], ids=["vectors", "dense"])
@pytest.mark.parametrize("seed", range(8))
def test_random_masks(seed: int, dense: bool) -> None:
    """Lengths up to 600, tiles of any size."""
    rng = random.Random(seed)
    mask = random_mask(rng, rng.choice((60, 600)), batch=2)
    data = data_of(mask, rng, "cuda", dense=dense)
    for _ in range(2):
        plan = plan_of(rng, data.band, None, mask_tables.ROW_BLOCK, of_bits=dense)
        same_tables(mask_tables.build(data, plan), defined(data, plan))


@pytest.mark.parametrize("seed", range(8))
def test_intervals(seed: int) -> None:
    """Of positions or of other numbers of keys, alone or beside vectors; q tiles and kv tiles of any size."""
    rng = random.Random(seed)
    mask = random_mask(rng, rng.choice((60, 600)), batch=rng.choice((1, 3)))
    data = data_of(mask, rng, "cuda")
    interval = tuple(None if bound is None else bound.cuda() for bound in interval_of(rng, data))
    alone = {} if seed % 2 else {"valid": None, "segments": None}
    data = with_values(data, interval=interval, **alone)
    plan = plan_of(rng, data.band, None, mask_tables.ROW_BLOCK)
    same_tables(mask_tables.build(data, plan), defined(data, plan))


@pytest.mark.parametrize("seed", range(20))
def test_work_lists(seed: int) -> None:
    """Of random packed documents."""
    same_work_lists(random.Random(seed), "cuda")


@pytest.mark.parametrize("seed", range(20))
def test_packed_documents(seed: int) -> None:
    """The tables of the backward, of random packed documents."""
    same_document_tables(random.Random(seed), device="cuda")


def test_long_documents_as_intervals() -> None:
    """Causal documents by the first token of each query's own."""
    ids = dict(packed(4096, 16).values)[Segments]["q"]
    starts = torch.searchsorted(ids, ids)
    data = MaskData(Band(0), 2, 4, 2, 4096, 4096, values_of(interval=(starts, None, None)))
    same_tables(mask_tables.build(data, PLAN), defined(data, PLAN))


def defined(data: MaskData, plan: Plan) -> MaskTables:
    """The tables by their definition, computed on the CPU."""
    values = tuple((kind, {name: t.cpu() for name, t in values.items()}) for kind, values in data.values)
    found = reference_tables.build(replace(data, values=values), plan)
    return MaskTables(*(t.cuda() for t in found))


def packed(length: int, documents: int, batch: int = 2) -> MaskData:
    """Causal documents, and a batch element of one giant and many small ones."""
    generator = torch.Generator().manual_seed(length)
    cuts = torch.randperm(length, generator=generator)[: documents - 1]
    starts = torch.zeros(2, length, dtype=torch.int64)
    starts[0, cuts], starts[1, cuts[cuts > length // 2]] = 1, 1
    ids = starts.cumsum(1)[:batch].cuda()
    return MaskData(Band(0), batch, 4, 2, length, length, values_of(segments=(ids, ids)))


@pytest.mark.parametrize("token_tiles", [8, 512])
def test_long_packed_documents(token_tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """4096 tokens: tile schedules of many steps, and every loop of the kernels has several turns."""
    monkeypatch.setattr(mask_tables, "TOKEN_TILES", token_tiles)
    data = packed(4096, 16)
    same_tables(mask_tables.build(data, PLAN), defined(data, PLAN))


def test_very_long_packed_documents() -> None:
    data = packed(16384, 8, batch=1)
    same_tables(mask_tables.build(data, PLAN), defined(data, PLAN))


IDS: dict[str, Callable[[torch.Generator, int], torch.Tensor]] = {
    "every token of its own, in any order": lambda rng, length: torch.randperm(length, generator=rng),
    "few in any order": lambda rng, length: torch.randint(-3, 3, (length,), generator=rng),
    "many in any order": lambda rng, length: torch.randint(0, 2000, (length,), generator=rng) - 2**62,
    "short documents, ids in any order": (
        lambda rng, length: torch.randperm(1000, generator=rng)[torch.arange(length) // 7 % 1000]
    ),
    "one": lambda rng, length: torch.full((length,), 2**63 - 1),
}


@pytest.mark.parametrize("band", [Band(), Band(0, None, "bottom_right"), Band(-100, 700)], ids=str)
@pytest.mark.parametrize("ids", IDS)
def test_ids_that_no_range_tells_apart(ids: str, band: Band) -> None:
    """Lengths that differ, a few keys that are not valid; both forms of tiles: one for both tile schedules, and two."""
    rng = torch.Generator().manual_seed(len(ids))
    q, kv = (torch.stack([IDS[ids](rng, length) for _ in range(2)]).cuda() for length in (1900, 2500))
    valid = torch.rand(2, 2500, generator=rng).cuda() < 0.98
    data = MaskData(band, 2, 4, 2, 1900, 2500, values_of(valid, (q, kv)))
    for plan in (replace(PLAN, schedule="spt"), replace(PLAN, schedule="spt", dkdv=Tiles(128, 64, 8, 2))):
        same_tables(mask_tables.build(data, plan), defined(data, plan))


@pytest.mark.parametrize("band", [Band(), Band(0), Band(0, 500)], ids=str)
def test_padding_on_either_side_and_holes(band: Band) -> None:
    keys = torch.arange(3000)
    valid = torch.stack([keys < 1777, keys >= 1500, keys % 97 != 5, keys < 0]).cuda()
    data = MaskData(band, 4, 4, 2, 3000, 3000, values_of(valid))
    plan = replace(PLAN, schedule="spt")
    same_tables(mask_tables.build(data, plan), defined(data, plan))


@pytest.mark.parametrize("band", [Band(), Band(0), Band(-100, 700)], ids=str)
@pytest.mark.parametrize("tiles", [(64, 128), (128, 128), (64, 64)], ids=str)
def test_dense_masks_of_whole_tiles(tiles: tuple[int, int], band: Band) -> None:
    """Rows that are read many bytes at once, and such that are not; a backward with the forward's tiles and others."""
    generator = torch.Generator().manual_seed(0)
    squares, pairs = torch.rand(2, 1, 24, 24, generator=generator), torch.rand(2, 1, 1536, 1536, generator=generator)
    squares = squares.repeat_interleave(64, 2).repeat_interleave(64, 3)
    shown = ((squares > 0.6) | (squares > 0.3) & (pairs < 0.5)).cuda()
    for dense in (shown, shown.mT, shown[:1].expand(2, -1, -1, -1), shown[..., 1:], shown[:, :, 3:], shown[..., :1]):
        q_len, kv_len = dense.shape[2], 1536 if dense.shape[3] == 1 else dense.shape[3]
        data = MaskData(band, 2, 4, 2, q_len, kv_len, values_of(dense=dense))
        plan = replace(PLAN, schedule="descending", dkdv=Tiles(*tiles, 8, 2))
        same_tables(mask_tables.build(data, plan), defined(data, plan))


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_same_words_every_time(deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    data = packed(32768, 16)

    def words() -> MaskTables:
        return mask_tables.build(data, PLAN)

    first = words()
    for _ in range(20):
        same_tables(words(), first)


def test_calls_of_the_operator_are_made_again_for_other_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its noted launches: other ids, ids of keys, keys that are not valid, dense masks, CUDA graphs."""
    rng = torch.Generator().manual_seed(5)

    def ids(length: int) -> torch.Tensor:
        return (torch.rand(2, length, generator=rng) < 0.01).cumsum(1).cuda()

    def valid() -> torch.Tensor:
        return (torch.rand(2, 900, generator=rng) < 0.9).cuda()

    def dense() -> torch.Tensor:
        return (torch.rand(2, 1, 900, 900, generator=rng) < 0.3).cuda()

    def made(mask: str, extras: list[torch.Tensor]) -> MaskTables:
        return MaskTables(*operator(extras, 900, 900, 2, 4, 2, mask, str(PLAN), True))

    def wanted(mask: str, extras: list[torch.Tensor]) -> MaskTables:
        return defined(MaskData.of(Mask.parse(mask), extras, (2, 4, 2, 900, 900)), PLAN)

    kinds: list[tuple[str, Callable[[], list[torch.Tensor]]]] = [
        ("causal & segments(0,0)", lambda: [ids(900)]),
        ("causal & segments(0,1)", lambda: [ids(900), ids(900)]),
        ("causal & segments(0,0) & keys(1)", lambda: [ids(900), valid()]),
        ("dense(0)", lambda: [dense()]),
        ("causal & interval(0,none,none)", lambda: [ids(900)]),
    ]
    for mask, make in kinds:
        calls = LaunchLists()
        monkeypatch.setattr(mask_tables, "CALLS", calls)
        for _ in range(3):
            extras = make()
            same_tables(made(mask, extras), wanted(mask, extras))
        assert len(calls._recorded) == 1, mask
        static = make()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tables = made(mask, static)
        for old, new in zip(static, make(), strict=True):
            old.copy_(new)
        graph.replay()
        same_tables(tables, wanted(mask, static))
