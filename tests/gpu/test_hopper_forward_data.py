"""The Hopper forward with masks that are data, on a GPU: against fp64, and bit by bit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.forward import compile_all
from dash_inductor.kernels.hopper.forward import build
from dash_inductor.kernels.hopper.forward.data import ForwardData
from dash_inductor.model import Band

from ..support import forward_tables, hopper_calls
from ..support.attention import Attention
from ..support.calls import forward_spec_of, traits_of
from ..support.hopper import MARKS
from ..support.hopper_forward import Forward, check_distance, rounded_under, rounding_of_sums
from ..support.hopper_forward import forward as without_data
from ..support.processes import once_in_this_run
from ..support.repeats import bits, differing_runs, poison

pytestmark = MARKS

FULL, CAUSAL, WINDOW = Band(), Band(0, None, "bottom_right"), Band(-70, 300)
BANDS = [FULL, CAUSAL, WINDOW]
DTYPES = {(64, 64): torch.float16, (128, 128): torch.bfloat16, (192, 128): torch.float16, (256, 256): torch.bfloat16}
"""Dtypes of the tests, by head dims; for the two most used both are compared with fp64."""
BOTH = [(64, 64), (128, 128)]
OTHER = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}
all_configs = pytest.mark.parametrize("dims", build.FORWARD_CONFIGS, ids=str)

SegmentIds = tuple[Tensor, Tensor]


def ones(batch: int, q_len: int, kv_len: int) -> SegmentIds:
    return torch.zeros(batch, q_len).int(), torch.zeros(batch, kv_len).int()


def hidden(batch: int, q_len: int, kv_len: int, hide: Callable[[int, Tensor], Tensor]) -> SegmentIds:
    """Keys of batch element b are hidden where ``hide(b, keys)``."""
    q, kv = ones(batch, q_len, kv_len)
    for b in range(batch):
        kv[b, hide(b, torch.arange(kv_len))] = -1
    return q, kv


def padded(batch: int, q_len: int, kv_len: int) -> SegmentIds:
    return hidden(batch, q_len, kv_len, lambda b, keys: keys >= kv_len - 1 - kv_len * b // batch)


def left(batch: int, q_len: int, kv_len: int) -> SegmentIds:
    return hidden(batch, q_len, kv_len, lambda b, keys: keys < 1 + kv_len * b // (batch + 1))


def holes(batch: int, q_len: int, kv_len: int) -> SegmentIds:
    """Whole kv tiles hidden between others, and single keys."""
    return hidden(batch, q_len, kv_len, lambda b, keys: (keys // 128 % 3 == b % 3) | (keys % 101 == 3))


def nobody(batch: int, q_len: int, kv_len: int) -> SegmentIds:
    """The first batch element sees nothing at all."""
    return hidden(batch, q_len, kv_len, lambda b, keys: keys < (1 << 30 if b == 0 else 3))


def packed(batch: int, q_len: int, kv_len: int) -> SegmentIds:
    """Documents of 20, 40, .. tokens; queries of some have no keys, and keys of some no queries."""
    ends = torch.tensor([10 * n * (n + 1) for n in range(1, 80)])
    q, kv = (torch.bucketize(torch.arange(n), ends, right=True).int().expand(batch, -1) for n in (q_len, kv_len))
    return q.contiguous(), (kv + torch.arange(batch)[:, None] // 2).int().contiguous()


def repeated(batch: int, q_len: int, kv_len: int) -> SegmentIds:
    """Numbers that come again: a row block sees kv tiles with others between, and of some tiles single keys."""
    q, kv = (torch.arange(n).int().expand(batch, -1) // 128 % 2 for n in (q_len, kv_len))
    kv = kv + torch.arange(batch)[:, None] * (torch.arange(kv_len) % 130 == 7)
    return q.contiguous(), kv.int().contiguous()


SEGMENT_IDS = {f.__name__: f for f in (ones, padded, left, holes, nobody, packed, repeated)}
segment_ids = pytest.mark.parametrize("segment_ids", SEGMENT_IDS)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Kernels are compiled several at a time, before the tests find them in Triton's cache one by one."""
    dtypes = {dims: [dtype, OTHER[dtype]] if dims in BOTH else [dtype] for dims, dtype in DTYPES.items()}
    names: dict[torch.dtype, Any] = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
    kernels = [
        build.Specialisation(names[dtype], *dims, traits_of(band, *data), even)
        for dims in build.FORWARD_CONFIGS
        for dtype in dtypes[dims]
        for band, even, data in itertools.product(BANDS, (False, True), ((False, False), (True, False), (False, True)))
    ]
    once_in_this_run("hopper_forward_data", lambda: compile_all(kernels))


@dataclass(frozen=True)
class Problem:
    """A problem whose mask is a band and segment ids; `keep` says who sees whom, [batch, 1, q_len, kv_len]."""

    plain: Attention
    data: ForwardData
    keep: Tensor

    @staticmethod
    def of(
        name: str, band: Band, q_len: int, kv_len: int, dims: tuple[int, int], *, batch: int = 3, kv_heads: int = 2,
        group: int = 1, dtype: torch.dtype | None = None,
    ) -> Problem:  # fmt: skip
        """Make a problem: rows and keys that nobody sees hold zeros here, and NaN in `given`."""
        p = Attention.random(
            q_len, kv_len, dims[0], band, batch=batch, kv_heads=kv_heads, group=group,
            dtype=dtype or DTYPES[build.tile_dims(*dims)], value_dim=dims[1],
        )  # fmt: skip
        found = [t.cuda() for t in SEGMENT_IDS[name](batch, q_len, kv_len)]
        config = build.FORWARD_CONFIGS[build.tile_dims(*dims)]
        band_keep = p.keep()
        keep = forward_tables.seen(found[0], found[1], band_keep)[:, None]
        rows, keys = keep.any(3)[..., None], keep.any(2)[..., None]
        p = dataclasses.replace(p, q=p.q * rows, k=p.k * keys, v=p.v * keys)
        data = forward_tables.of_segment_ids(
            found[0], found[1], band_keep, band.lo is not None, config.consumers, config.block_kv
        )
        return Problem(p, data, keep)

    @cached_property
    def given(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as the kernel gets them."""
        p = self.plain
        rows, keys = self.keep.any(3), self.keep.any(2)
        if keys.shape[1] > 1:
            keys = keys.unflatten(1, (p.k.shape[1], p.group)).any(2)
        k, v = (torch.where(keys[..., None], t, torch.nan) for t in (p.k, p.v))
        return torch.where(rows[..., None], p.q, torch.nan), k, v

    def run(self, **how: Any) -> Forward:
        p = self.plain
        return hopper_calls.forward(*self.given, forward_spec_of(p.mask, p.scale, self.data), self.data, **how)

    def exact(self) -> Forward:
        p = self.plain
        k, v = (t.double().repeat_interleave(p.group, 1) for t in (p.k, p.v))
        s = (p.q.double() @ k.mT * p.scale).masked_fill(~self.keep, -torch.inf)
        lse = s.logsumexp(-1)
        weights = torch.where(self.keep, (s - torch.where(lse.isfinite(), lse, 0.0)[..., None]).exp(), 0.0)
        return weights @ v, lse

    def check(self, found: Forward) -> None:
        (out, lse), (exact_out, exact_lse), p = found, self.exact(), self.plain
        sees = self.keep.any(-1).expand(lse.shape)
        assert (out[~sees] == 0).all()
        assert (lse[~sees] == -torch.inf).all()
        theirs = rounded_under(self.keep, p.q, p.k, p.v, p.scale)
        check_distance(out, theirs, exact_out, False, f"{tuple(p.q.shape)}, {tuple(p.k.shape)}, {p.mask}")
        off = (lse.double() - exact_lse)[sees].abs()
        rounding = rounding_of_sums(p.q.dtype, (p.q.shape[3], p.v.shape[3]))
        assert (off <= rounding + 1e-5 + 1e-5 * exact_lse[sees].abs() + 4e-6 * p.scale * p.q.shape[3]).all()

    def part(self, order: Sequence[int]) -> Problem:
        """The problem of the batch elements in `order`."""
        p, d = self.plain, self.data
        at = torch.tensor(order, device="cuda")
        data = ForwardData(*(None if t is None else t[at].contiguous() for t in d))  # type: ignore[arg-type]
        return Problem(dataclasses.replace(p, q=p.q[at], k=p.k[at], v=p.v[at]), data, self.keep[at])


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


LENGTHS = [(700, 700), (640, 640), (113, 1024), (1023, 200), (1, 300), (300, 1)]


@segment_ids
@all_configs
def test_lengths(dims: tuple[int, int], segment_ids: str) -> None:
    groups = itertools.cycle((1, 4, 2))
    for band, (q_len, kv_len) in itertools.product(BANDS, LENGTHS):
        p = Problem.of(segment_ids, band, q_len, kv_len, dims, group=next(groups))
        poison()
        p.check(p.run())


@segment_ids
@pytest.mark.parametrize("dims", BOTH, ids=str)
def test_the_other_dtype(dims: tuple[int, int], segment_ids: str) -> None:
    for band in BANDS:
        p = Problem.of(segment_ids, band, 700, 700, dims, group=2, dtype=OTHER[DTYPES[dims]])
        p.check(p.run())


@pytest.mark.parametrize("dims", [(8, 8), (40, 40), (96, 96), (136, 72), (200, 256)], ids=str)
def test_smaller_head_dims(dims: tuple[int, int]) -> None:
    for segment_ids, band in itertools.product(("padded", "packed"), BANDS):
        p = Problem.of(segment_ids, band, 300, 333, dims)
        p.check(p.run())


@all_configs
def test_segment_ids_that_hide_nothing_change_no_bit(dims: tuple[int, int]) -> None:
    for band, (q_len, kv_len) in itertools.product(BANDS, [*LENGTHS, (2048, 2048)]):
        p = Problem.of("ones", band, q_len, kv_len, dims, batch=2, group=2)
        assert same(without_data(p.plain), p.run()), (band, q_len, kv_len)


def dense(by_head: bool, band: Band, q_len: int, kv_len: int, dims: tuple[int, int]) -> tuple[Problem, Problem]:
    """A problem under a dense mask, of which a third each of the squares of 64 tokens is hidden, seen and mixed.

    With one table for all heads, unless heads differ; and with one for each.
    """
    p = Attention.random(
        q_len, kv_len, dims[0], band, batch=2, kv_heads=2, group=2, dtype=DTYPES[build.tile_dims(*dims)],
        value_dim=dims[1],
    )  # fmt: skip
    generator = torch.Generator("cuda").manual_seed(q_len)
    squares, pairs = (
        torch.rand(2, 4 if by_head else 1, q_len, kv_len, device="cuda", generator=generator) for _ in "sp"
    )
    of_square = [torch.arange(length, device="cuda") // 64 * 64 for length in (q_len, kv_len)]
    squares = squares[:, :, of_square[0]][..., of_square[1]]
    shown = (squares > 0.67) | (squares > 0.33) & (pairs < 0.3)
    keep = shown & p.keep()
    of_keys = keep.expand(-1, 4, -1, -1).unflatten(1, (2, 2)).any(2).any(2)[..., None]
    band_keep, sizes, config = p.keep(), (2, 4, q_len, kv_len), build.FORWARD_CONFIGS[build.tile_dims(*dims)]
    p = dataclasses.replace(p, q=p.q * keep.any(3)[..., None], k=p.k * of_keys, v=p.v * of_keys)
    first, second = (
        Problem(p, forward_tables.of_dense(
            mask, sizes, band_keep, config.consumers, config.block_kv
        ), keep)
        for mask in (shown, shown.expand(-1, 4, -1, -1))
    )  # fmt: skip
    return first, second


@pytest.mark.parametrize("by_head", [False, True])
@all_configs
def test_dense_masks(dims: tuple[int, int], by_head: bool) -> None:
    for band, (q_len, kv_len) in itertools.product(BANDS, LENGTHS):
        p, of_heads = dense(by_head, band, q_len, kv_len, dims)
        poison()
        found = p.run()
        p.check(found)
        assert same(found, p.run())
        assert same(found, of_heads.run())


SHAPES = [
    ("padded", CAUSAL, 1024, 1024, (128, 128)),
    ("packed", CAUSAL, 2048, 2048, (128, 128)),
    ("packed", WINDOW, 1500, 1500, (64, 64)),
    ("holes", FULL, 1000, 1500, (64, 64)),
    ("repeated", FULL, 1024, 1024, (192, 128)),
    ("packed", CAUSAL, 700, 1000, (256, 256)),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.mark.parametrize("load", [False, True], ids=["idle", "load"])
@shapes
def test_repeats(shape: tuple[Any, ...], load: bool) -> None:
    p = Problem.of(*shape, kv_heads=4, group=2)
    p.check(p.run())
    assert differing_runs(p.run, 300, load=load) == 0


@shapes
def test_poisoned_memory(shape: tuple[Any, ...]) -> None:
    p = Problem.of(*shape)
    assert differing_runs(p.run, 30, poisoned=True) == 0


@shapes
def test_any_number_of_ctas(shape: tuple[Any, ...]) -> None:
    p = Problem.of(*shape)
    expected = p.run()
    for ctas in (1, 2, 7, 64, 131, 1000):
        assert same(expected, p.run(ctas=ctas)), ctas


@shapes
def test_any_batch_and_any_place(shape: tuple[Any, ...]) -> None:
    p = Problem.of(*shape, batch=5)
    whole = p.run()
    for order in ([0], [4], [2, 1], [4, 3, 2, 1, 0], [1, 1, 3]):
        assert same([t[order] for t in whole], p.part(order).run()), order


def test_graph_replay() -> None:
    p = Problem.of(*SHAPES[1])
    expected = [t.clone() for t in p.run()]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = p.run()
    for _ in range(20):
        graph.replay()
    assert same(expected, captured)


def test_long_rows_of_documents() -> None:
    """Many tiles, each with few of many kv tiles: what a tile does not see is not brought."""
    p = Problem.of("packed", CAUSAL, 6000, 6000, (128, 128), batch=1, kv_heads=1)
    assert int(p.data.counts.sum()) < 6000 // 128 * 8
    p.check(p.run())
    assert differing_runs(p.run, 100, load=True) == 0
