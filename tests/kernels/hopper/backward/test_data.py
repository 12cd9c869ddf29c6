"""The arguments of the Hopper backward where its mask is data: what it refuses, and the tables of the GPU tests."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from dash_inductor.errors import ArgumentError
from dash_inductor.kernels.hopper.backward.arguments import CONTRIBUTIONS, DATA
from dash_inductor.kernels.hopper.backward.data import Arguments, BackwardData
from dash_inductor.model import AttentionSpec, Band, Dropout, Mask, Operand
from dash_inductor.schedule import Problem
from dash_inductor.schedule.schedules import NAMES, supports
from dash_inductor.schedule.table_tile_schedule import TILE_BITS
from dash_inductor.schedule.tile_schedule import ClosedForm
from dash_inductor.schedule.visibility import EMPTY, FULL, PARTIAL
from dash_inductor.schedule.visibility import tile_pairs as by_definition

from ....support.hopper_data import KINDS, VisibleTileSchedule, data_of, keep_of, segment_ids_of, tile_pairs

CPU = torch.device("cpu")
FIELD = (1 << TILE_BITS) - 1


def closed(name: str, band: Band, q_len: int, kv_len: int, batch: int = 1, heads: int = 6) -> ClosedForm:
    return ClosedForm(name, Problem(band, q_len, kv_len, 8, 16, batch, heads, head_chunk=2))


def random_dense(rng: random.Random, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    return torch.rand(*shape, generator=generator) < rng.choice((0.01, 0.2, 0.95))


SHAPES = [(Band(), 40, 100), (Band(0), 90, 90), (Band(0, 20), 70, 33), (Band(-5, 40, "bottom_right"), 33, 70)]
CLOSED = [
    (name, *shape) for name in NAMES if name != "two_pass" for shape in SHAPES if supports(name, shape[0]) is None
]
CLOSED += [("bent_fold", Band(0), 530, 300)]  # long enough for tile schedules to be bent


@pytest.mark.parametrize(("name", "band", "q_len", "kv_len"), CLOSED, ids=str)
@pytest.mark.parametrize("by_head", [False, True], ids=["segment_ids", "dense by head"])
def test_tables_tile_schedule_what_is_seen(name: str, band: Band, q_len: int, kv_len: int, by_head: bool) -> None:
    """Every visible pair once, in the order of the closed form; ranks without gaps, in its order too."""
    batch, heads = len(KINDS), 6
    tile_schedule = closed(name, band, q_len, kv_len, batch, heads)
    segment_ids = segment_ids_of(band, q_len, kv_len)
    dense = random_dense(random.Random(name), 1, heads, q_len, kv_len) if by_head else None
    keep = keep_of(band, segment_ids, dense, (batch, q_len, kv_len))
    data = data_of(tile_schedule, keep, segment_ids, dense)
    found: dict[object, Any] = {}  # by batch element and head of the mask
    for b in range(batch):
        for q_head in range(heads):
            table = b * heads + q_head if by_head else b
            place_of_mask = b, q_head if by_head else 0
            if place_of_mask not in found:
                seen = keep[place_of_mask].tolist()
                found[place_of_mask] = by_definition(lambda i, j: seen[i][j], q_len, kv_len, 8, 16)  # noqa: B023  # used at once
            pairs = found[place_of_mask]
            adds: dict[int, list[tuple[int, int]]] = {q: [] for q in range(tile_schedule.problem.n_q)}
            for kv in range(tile_schedule.problem.n_kv):
                packed_tiles = data.steps[table, kv, : data.visits[table, kv]].tolist()
                tiles = [packed_tile & FIELD for packed_tile in packed_tiles]
                full = [tile_schedule.q_tile(q_head, kv, step) for step in range(tile_schedule.visits(q_head, kv))]
                assert tiles == [q for q in full if pairs[q][kv] != EMPTY]
                assert [packed_tile >> 2 * TILE_BITS & 1 for packed_tile in packed_tiles] == [
                    pairs[q][kv] == PARTIAL for q in tiles
                ]
                for q, packed_tile in zip(tiles, packed_tiles, strict=True):
                    adds[q].append((packed_tile >> TILE_BITS & FIELD, tile_schedule.rank(q_head, q, kv)))
            for q, ranks in adds.items():
                assert data.contributions[table, q] == len(ranks)
                assert [r for r, _ in sorted(ranks)] == list(range(len(ranks)))
                assert sorted(ranks) == sorted(ranks, key=lambda pair: pair[1])


@pytest.mark.parametrize(("name", "band", "q_len", "kv_len"), CLOSED, ids=str)
def test_a_mask_that_hides_nothing_has_the_tile_schedules_of_the_band(
    name: str, band: Band, q_len: int, kv_len: int
) -> None:
    tile_schedule = closed(name, band, q_len, kv_len)
    keep = keep_of(band, None, None, (1, q_len, kv_len))
    (pairs,) = tile_pairs(keep[0], 8, 16)
    seen = keep[0, 0].tolist()
    assert pairs == by_definition(lambda i, j: seen[i][j], q_len, kv_len, 8, 16)
    visible = VisibleTileSchedule(tile_schedule, pairs)
    for head in range(6):
        for kv in range(tile_schedule.problem.n_kv):
            steps = [tile_schedule.q_tile(head, kv, step) for step in range(tile_schedule.visits(head, kv))]
            assert visible.q_tiles(kv) == steps
            packed_tiles = [(tile_schedule.rank(head, q, kv), pairs[q][kv] != FULL) for q in steps]
            assert [
                (packed_tile >> TILE_BITS & FIELD, packed_tile >> 2 * TILE_BITS & 1)
                for packed_tile in visible.packed_tiles(kv)
            ] == packed_tiles


MASKS = {"segment_ids": Mask.parse("causal & keys(0)"), "dense": Mask.parse("dense(0)")}
MASKS |= {"both": Mask.parse("causal & segments(1,1) & dense(0)")}


def sample(mask: Mask, schedule: str = "bent_fold", dense_heads: int = 1) -> tuple[BackwardData, ClosedForm]:
    """Data of a batch of 2, 4 query heads, 20 queries and 40 keys."""
    tile_schedule = closed(schedule, mask.band, 20, 40, 2, 4)
    segment_ids = (
        None if mask.keys is None and mask.segments is None else segment_ids_of(mask.band, 20, 40, ("ones", "packed"))
    )
    dense = None if mask.dense is None else torch.ones(1, dense_heads, 20, 40, dtype=torch.bool)
    return data_of(
        tile_schedule, keep_of(mask.band, segment_ids, dense, (2, 20, 40)), segment_ids, dense
    ), tile_schedule


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("schedule", ["bent_fold", "spt"])
def test_arguments(name: str, schedule: str) -> None:
    for dense_heads in (1, 4):
        data, tile_schedule = sample(MASKS[name], schedule, dense_heads)
        arguments = Arguments.of(AttentionSpec(MASKS[name], 1.0), data, tile_schedule, CPU)
        places = tuple(None if t is None else i for i, t in enumerate(data))
        addresses: dict[int, Any] = {i: t.data_ptr() for i, t in enumerate(data) if t is not None}
        found: dict[str, Any] = arguments.of_call(places, addresses)
        main = dict(zip(DATA.names, found["data"], strict=True))
        finish = dict(zip(CONTRIBUTIONS.names, found["contributions"], strict=True))
        assert found["varlen_layout"] is None
        by_head = data.seen_bits is not None and dense_heads == 4
        assert (main["table_b"], main["table_h"]) == ((4, 1) if by_head else (1, 0))
        assert (finish["table_b"], finish["table_h"]) == (main["table_b"], main["table_h"])
        pointers = {n: 0 if t is None else t.data_ptr() for n, t in zip(data._fields, data, strict=True)}
        names = "visits", "q_vectors", "kv_vectors", "keys_seen", "seen_bits"
        assert {n: main[n] for n in names} == {n: pointers[n] for n in names}
        assert (main["packed_tiles"], finish["contributions"]) == (pointers["steps"], pointers["contributions"])


BAD = {
    "q_vectors": [lambda t: None, lambda t: t.long(), lambda t: t[..., :-1], lambda t: t.repeat(1, 1, 2)[..., ::2],
                lambda t: t[0]],
    "kv_vectors": [lambda t: None, lambda t: t.short(), lambda t: t[:1], lambda t: t.to("meta")],
    "keys_seen": [lambda t: t.byte(), lambda t: t[:, :, :-1], lambda t: t[:1], lambda t: t[:, 0]],
    "visits": [lambda t: t[:1], lambda t: t[:, 1:], lambda t: t.long()],
    "steps": [lambda t: t[:, :, :-1], lambda t: t.flatten(1), lambda t: t.mT.contiguous().mT],
    "contributions": [lambda t: t[:1], lambda t: t.long()],
    "seen_bits": [lambda t: None, lambda t: t.long(), lambda t: t[:, :, :-1], lambda t: t[:1], lambda t: t[0]],
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_other_tensors_are_refused(name: str) -> None:
    mask = MASKS["segment_ids" if "vectors" in name else "both"]
    data, tile_schedule = sample(mask)
    Arguments.of(AttentionSpec(mask, 1.0), data, tile_schedule, CPU)
    for change in BAD[name]:
        bad = data._replace(**{name: change(getattr(data, name))})
        with pytest.raises(ArgumentError, match=rf"data\.{name}"):
            Arguments.of(AttentionSpec(mask, 1.0), bad, tile_schedule, CPU)


@pytest.mark.parametrize(("mask", "name"), [("segment_ids", "seen_bits"), ("dense", "q_vectors")])
def test_tensors_that_the_mask_lacks_are_refused(mask: str, name: str) -> None:
    other, tile_schedule = sample(MASKS["both" if name == "seen_bits" else "segment_ids"])
    data = sample(MASKS[mask])[0]._replace(**{name: getattr(other, name)})
    with pytest.raises(ArgumentError, match=rf"data\.{name}"):
        Arguments.of(AttentionSpec(MASKS[mask], 1.0), data, tile_schedule, CPU)


def test_tables_without_room_are_refused() -> None:
    data, _ = sample(MASKS["segment_ids"])
    for q_len, batch in ((8 << TILE_BITS) + 1, 1), (8 << 14, 1 << 14):
        with pytest.raises(ArgumentError, match="q tiles"):
            Arguments.of(AttentionSpec(MASKS["segment_ids"], 1.0), data, closed("spt", Band(0), q_len, 200, batch), CPU)


def test_vectors_whose_offsets_need_more_than_32_bits_are_refused() -> None:
    data, _ = sample(MASKS["segment_ids"])
    for q_len, kv_len in (64, 16 << 10), (16 << 10, 64):
        tile_schedule = closed("spt", Band(0), q_len, kv_len, 1 << 17)
        with pytest.raises(ArgumentError, match="numbers of queries or keys"):
            Arguments.of(AttentionSpec(MASKS["segment_ids"], 1.0), data, tile_schedule, CPU)


@pytest.mark.parametrize("drops", [False, True])
def test_extras(drops: bool) -> None:
    """Operands first, in the order in which the call names them; then segment ids and tables."""
    tensors = [torch.empty(0) for _ in range(12)]

    def spec(text: str) -> AttentionSpec:
        mask = Mask.parse(text)
        return AttentionSpec(mask, 1.0, dropout=Dropout(0.1, Operand(len(mask.operands))) if drops else None)

    assert BackwardData.of(spec("causal"), tensors[:drops]) is None
    for text, of_mask in (("causal & keys(0)", 1), ("segments(0,1) & keys(2)", 3)):
        operands = of_mask + drops
        data = BackwardData.of(spec(text), tensors[: operands + 6])
        assert data is not None
        assert all(a is b for a, b in zip(data[:6], tensors[operands:], strict=False))
        assert data.seen_bits is None
        for count in (operands, operands + 5, operands + 7):
            with pytest.raises(ArgumentError, match="extras"):
                BackwardData.of(spec(text), (tensors * 2)[:count])
    for text, of_mask in (("dense(0)", 1), ("segments(0,0) & dense(1)", 2)):
        data = BackwardData.of(spec(text), tensors[: of_mask + 5 + drops])
        assert data is not None
        assert data[:2] == (None, None)
        assert all(a is b for a, b in zip(data[2:7], tensors[of_mask + drops :], strict=False))


def test_a_mask_of_rows() -> None:
    """Place and count are operands of the call; lengths are theirs."""
    tensors = [torch.empty(0) for _ in range(10)]
    mask = Mask.parse("causal & segments(0,1):varlen(2,3)")
    data = BackwardData.of(AttentionSpec(mask, 1.0), tensors)
    assert data is not None
    assert all(a is b for a, b in zip(data[:6], tensors[4:], strict=True))
    assert (data.token_offsets is tensors[2], data.token_counts is tensors[3], data.seen_bits) == (True, True, None)

    tile_schedule = closed("spt", mask.band, 256, 256, 1, 4)
    segment_ids = segment_ids_of(mask.band, 256, 256, ("packed",))
    place, count = (torch.zeros(4, dtype=torch.int32) for _ in range(2))
    made = data_of(tile_schedule, keep_of(mask.band, segment_ids, None, (1, 256, 256)), segment_ids, None)
    good = made._replace(token_offsets=place, token_counts=count)
    Arguments.of(AttentionSpec(mask, 1.0), good, tile_schedule, CPU)
    for name, bad in (
        ("token_offsets", None), ("token_offsets", place.long()), ("token_offsets", place[:3]), ("token_counts", None),
        ("token_counts", count[None]), ("token_counts", torch.zeros(8, dtype=torch.int32)[::2]),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=rf"data\.{name}"):
            Arguments.of(AttentionSpec(mask, 1.0), good._replace(**{name: bad}), tile_schedule, CPU)
    with pytest.raises(ArgumentError, match=r"data\.token_offsets"):  # which another mask does not have
        Arguments.of(AttentionSpec(Mask.parse("causal & segments(0,1)"), 1.0), good, tile_schedule, CPU)
