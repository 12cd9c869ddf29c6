"""The closed forms of tile visibility against the mask itself, token by token."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import sympy
from hypothesis import given, settings

from dash_inductor.errors import ArgumentError
from dash_inductor.model.mask import Band
from dash_inductor.schedule.geometry import all_seen
from dash_inductor.schedule.tile_schedule import Problem, functions
from tests.support.schedules import problems


def _seen(p: Problem) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """(visible, full) tile pairs, by looking at every existing row and key."""
    count: dict[tuple[int, int], int] = {}
    for i in range(p.q_len):
        for j in range(p.kv_len):
            if p.band.visible(i, j, p.q_len, p.kv_len):
                pair = i // p.block_q, j // p.block_kv
                count[pair] = count.get(pair, 0) + 1
    full = set()
    for (q, kv), n in count.items():
        rows = min((q + 1) * p.block_q, p.q_len) - q * p.block_q
        if (kv + 1) * p.block_kv <= p.kv_len and n == rows * p.block_kv:
            full.add((q, kv))
    return set(count), full


def _assert_exact(p: Problem) -> None:
    f, tail = functions("two_pass", p), p.tail()
    visible, full = _seen(p)
    for kv in range(p.n_kv):
        first, full_first, full_end, end = f.dash_q_range(kv, *tail)
        assert 0 <= first <= full_first <= full_end <= end <= p.n_q
        assert list(range(first, end)) == sorted(q for q, k in visible if k == kv)
        assert list(range(full_first, full_end)) == sorted(q for q, k in full if k == kv)
    for q in range(p.n_q):
        first, full_first, full_end, end = f.dash_kv_range(q, *tail)
        assert 0 <= first <= full_first <= full_end <= end <= p.n_kv
        assert list(range(first, end)) == sorted(k for x, k in visible if x == q)
        assert list(range(full_first, full_end)) == sorted(k for x, k in full if x == q)


def _assert_seen(p: Problem) -> None:
    f, tail = functions("two_pass", p), p.tail()
    pairs = [
        (i, j) for i in range(p.q_len) for j in range(p.kv_len) if p.band.visible(i, j, p.q_len, p.kv_len)
    ]  # fmt: skip
    assert list(range(*f.dash_seen_rows(*tail))) == sorted({i for i, _ in pairs})
    assert list(range(*f.dash_seen_keys(*tail))) == sorted({j for _, j in pairs})
    everything = len({i for i, _ in pairs}) == p.q_len, len({j for _, j in pairs}) == p.kv_len
    assert all_seen(p.band, p.q_len, p.kv_len) == everything


@settings(max_examples=150)
@given(problems(max_tiles=12))
def test_visible_and_full_tiles_are_exact(p: Problem) -> None:
    _assert_exact(p)
    _assert_seen(p)


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 9), (9, 1), (7, 7), (5, 9), (9, 5)])
def test_rows_and_keys_that_take_part(q_len: int, kv_len: int) -> None:
    """Every band there is at these lengths, bands that let nothing through included."""
    bounds = [None, *range(-11, 12)]
    for lo, hi in itertools.product(bounds, bounds):
        if lo is None or hi is None or lo <= hi:
            for anchor in ("top_left", "bottom_right"):
                _assert_seen(Problem(Band(lo, hi, anchor), q_len, kv_len, 2, 4))  # type: ignore[arg-type]  # a name


@pytest.mark.parametrize(
    "band", [Band(0, None), Band(0, 100), Band(-5, 5), Band(0, None, "bottom_right"), Band(-90, -3)]
)
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 113), (113, 1), (64, 64), (113, 129), (17, 17)])
def test_visible_and_full_tiles_of_kernel_shapes(band: Band, q_len: int, kv_len: int) -> None:
    for block_q, block_kv in ((32, 16), (16, 32), (16, 16)):
        _assert_exact(Problem(band, q_len, kv_len, block_q, block_kv))


def test_what_is_seen_at_unknown_lengths() -> None:
    """Only what holds at all lengths: `s` and `t` may be any."""
    s, t = sympy.symbols("s t", integer=True, positive=True)
    assert all_seen(Band(), s, t) == (True, True)
    assert all_seen(Band(0), s, s) == all_seen(Band(0, None, "bottom_right"), s, s) == (True, True)
    assert all_seen(Band(0), s, t) == (True, False)
    assert all_seen(Band(0, None, "bottom_right"), s, t) == (False, True)
    assert all_seen(Band(0, 9), s, t)[0] is False


def test_bounds_that_exclude_nothing_change_nothing() -> None:
    bounded, free = Problem(Band(-10_000, 10_000), 37, 53, 8, 16), Problem(Band(), 37, 53, 8, 16)
    for name in ("dash_q_range", "dash_kv_range"):
        for x in range(4):
            ranges = [getattr(functions("spt", p), name)(x, *p.tail()) for p in (bounded, free)]
            assert ranges[0] == ranges[1]


@pytest.mark.parametrize(
    "changes", [{"q_len": 2**30}, {"kv_len": 2**31}, {"band": Band(-(2**30), None)}, {"band": Band(0, 2**30)}]
)
def test_positions_must_fit_the_kernels_integers(changes: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="at most 1073741823 in magnitude"):
        Problem(**({"band": Band(), "q_len": 1, "kv_len": 1, "block_q": 64, "block_kv": 64} | changes))


def test_lengths_must_be_positive() -> None:
    with pytest.raises(ArgumentError, match="kv_len=0"):
        Problem(Band(), 1, 0, 8, 8)
