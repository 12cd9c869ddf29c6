"""`model.relations.BETWEEN` on devices: a query sees the keys whose number lies between two bounds of the query.

The numbers are positions of keys (`KV_RANGES`), or ranks of the numbers of keys (`RANKS`).  Only integers are computed,
and whatever belongs to a batch element is computed from its own data.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .form import FAR, Form, Vectors, load_positions, load_vector

if TYPE_CHECKING:
    from ...mask_data import MaskData


def _kv_ranges(of: Vectors, data: "MaskData") -> tuple[Tensor, Tensor]:
    """Computes the vectors of `KV_RANGES`; `write_kv_ranges` is the same as a kernel."""
    lo, hi, _ = _operands(of)
    band, queries = data.band.resolve(data.q_len, data.kv_len), torch.arange(data.q_len, device=data.device)
    first = torch.zeros(data.batch, data.q_len, dtype=torch.int64, device=data.device) if lo is None else lo
    end = torch.full_like(first, data.kv_len) if hi is None else hi.clamp(max=data.kv_len) + 1
    if band.hi is not None:
        first = torch.maximum(first, queries - band.hi)
    if band.lo is not None:
        end = torch.minimum(end, queries - band.lo + 1)
    limits = first.clamp(0, data.kv_len), end.clamp(0, data.kv_len)
    none = torch.empty(data.batch, 0, data.kv_len, dtype=torch.int32, device=data.device)
    return torch.stack(limits, 1).to(torch.int32), none


def _ranks(of: Vectors, data: "MaskData") -> tuple[Tensor, Tensor]:
    """Computes the vectors of `RANKS`.

    Only the order of the numbers matters, so each is replaced by its index among the sorted numbers.
    """
    lo, hi, number = _operands(of)
    if number is None:
        number = torch.arange(data.kv_len, device=data.device).expand(data.batch, -1).contiguous()
    ordered = number.sort(1).values
    ranks = torch.searchsorted(ordered, number)
    first = torch.zeros(data.batch, data.q_len, dtype=torch.int64, device=data.device)
    end = torch.full_like(first, data.kv_len)
    if lo is not None:
        first = torch.searchsorted(ordered, lo.contiguous())
    if hi is not None:
        end = torch.searchsorted(ordered, hi.contiguous(), right=True)
    return torch.stack((first, end), 1).to(torch.int32), ranks[:, None].to(torch.int32)


def _operands(of: Vectors) -> list[Tensor | None]:
    """The bounds of the queries and the numbers of the keys, int64; None where absent."""
    return [None if t is None else t.long() for t in map(of.values.get, ("least", "most", "number"))]


@triton.jit(do_not_specialize=["q_len", "kv_len", "lo", "hi"])
def write_kv_ranges(
    LEAST, MOST, KV_RANGES, least_b, least_i, most_b, most_i, q_len, kv_len, lo, hi,
    HAS_LEAST: tl.constexpr, HAS_MOST: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the first position that each query sees, and the one after the last.

    One program per (batch element, BLOCK queries).  LEAST, MOST: integers [batch, q_len], the bounds of the intervals,
    with their strides; an absent one is not read.  lo, hi: of the band.  KV_RANGES: int32, two of the QUERIES vectors
    of a batch element, [2, q_len].
    """
    b = tl.program_id(0).to(tl.int64)
    queries = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = queries < q_len
    first = tl.zeros([BLOCK], tl.int64)
    end = first + kv_len
    if HAS_LEAST:
        first = tl.load(LEAST + b * least_b + queries * least_i, mask=there, other=0).to(tl.int64)
    if HAS_MOST:
        most = tl.load(MOST + b * most_b + queries * most_i, mask=there, other=0).to(tl.int64)
        end = tl.minimum(most, end) + 1
    if HAS_HI:
        first = tl.maximum(first, queries - hi)
    if HAS_LO:
        end = tl.minimum(end, queries - lo + 1)
    last = tl.zeros([BLOCK], tl.int64) + kv_len
    kv_ranges = KV_RANGES + b * (QUERIES * q_len) + queries
    tl.store(kv_ranges, tl.minimum(tl.maximum(first, 0), last).to(tl.int32), mask=there)
    tl.store(kv_ranges + q_len, tl.minimum(tl.maximum(end, 0), last).to(tl.int32), mask=there)


@triton.jit
def _load_queries(side, row, tokens, exists):
    first = load_vector(side, row, tokens, exists, FAR)
    return first, load_vector(side, row + 1, tokens, exists, 0)


@triton.jit
def _load_keys(side, row, tokens, exists):
    return (load_vector(side, row, tokens, exists, 0),)


@triton.jit
def _test(shown, queries, keys):
    return shown & (queries[0] <= keys[0]) & (keys[0] < queries[1])


@triton.jit
def _some_row(first, behind, least, most):
    """Returns [kv tiles, q tiles]: whether the range ``first .. behind - 1`` of any row meets a kv tile's range."""
    KV_TILES: tl.constexpr = least.shape[0]
    tiles = tl.arange(0, KV_TILES)
    found = tl.zeros([KV_TILES, first.shape[0]], tl.int1)
    for i in tl.static_range(KV_TILES):
        from_, to = tl.min(tl.where(tiles == i, least, FAR), 0), tl.max(tl.where(tiles == i, most, -1), 0)
        meets = tl.max((tl.maximum(first, from_) <= tl.minimum(behind - 1, to)).to(tl.int32), 1) != 0
        found = found | ((tiles == i)[:, None] & meets[None, :])
    return found


@triton.jit
def _in_all_rows(queries, rows_exist, keys, columns_exist):
    """Returns (least and largest number of each kv tile, whether all rows of a q tile see all of its keys)."""
    first, behind = queries[0], queries[1]
    least = tl.min(tl.where(columns_exist, keys[0], FAR), 1)
    most = tl.max(tl.where(columns_exist, keys[0], -1), 1)
    all_first = tl.max(tl.where(rows_exist, first, -1), 1)[None, :]
    all_behind = tl.min(tl.where(rows_exist, behind, FAR), 1)[None, :]
    return least, most, (all_first <= least[:, None]) & (most[:, None] < all_behind)


@triton.jit
def _classify_kv_ranges(queries, rows_exist, keys, columns_exist):
    """The result is exact, since a tile's keys are contiguous."""
    least, most, shown = _in_all_rows(queries, rows_exist, keys, columns_exist)
    some = _some_row(queries[0], queries[1], least, most)
    return some == 0, shown, some


@triton.jit
def _classify_ranks(queries, rows_exist, keys, columns_exist):
    least, most, shown = _in_all_rows(queries, rows_exist, keys, columns_exist)
    first, behind = queries[0], queries[1]
    beside = (tl.min(first, 1)[None, :] > most[:, None]) | (tl.max(behind, 1)[None, :] <= least[:, None])
    return beside, shown, _some_row(first, behind, least, least) | _some_row(first, behind, most, most)


@gluon.jit
def _keep(s, queries, keys):
    return keep_between(s, keys[0], queries[0], queries[1])


@gluon.jit
def keep_between(s, keys, first, end):
    """Returns the scores `s` where ``first <= keys < end``, else -inf.

    It is one inline assembly operation, as `_keep_below` in `hopper.forward.device.steps`.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred %keep;
        setp.lt.s32 %keep, $2, $4;
        setp.ge.and.s32 %keep, $2, $3, %keep;
        selp.f32 $0, $1, 0fFF800000, %keep;
        }""",
        "=f,f,r,r,r",
        [s, keys, first, end],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


KV_RANGES = Form(
    "kv_ranges", 2, 0, _kv_ranges, _load_queries, load_positions, _test, _classify_kv_ranges, _keep,
    reads_positions=True, is_range=True,
)  # fmt: skip
"""Kv ranges: a query sees the keys at positions ``first <= position < end``, already clipped to band and length."""

RANKS = Form("ranks", 2, 1, _ranks, _load_queries, _load_keys, _test, _classify_ranks, _keep)
"""As `KV_RANGES`, but compared with a number per key (its rank, at least 0) in place of its position."""

FORMS = RANKS, KV_RANGES
