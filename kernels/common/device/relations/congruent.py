"""`model.relations.CONGRUENT` on devices: a query sees the keys of an arithmetic progression of positions.

Its vectors are the first position that a query sees, as if there were neither band nor other terms, and how many keys
it skips between two that it sees.
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

MOST_SKIPPED = 2**30
"""More than the distance between any two positions."""


def _progressions(of: Vectors, data: "MaskData") -> tuple[Tensor, Tensor]:
    """Computes the vectors; a first position past the end is `kv_len`, since the query then sees no key."""
    number, step = (of.values[role].long() for role in ("number", "step"))
    step = step.abs().clamp(min=1)
    first, skipped = (number % step).clamp(max=data.kv_len), (step - 1).clamp(max=MOST_SKIPPED)
    none = torch.empty(data.batch, 0, data.kv_len, dtype=torch.int32, device=data.device)
    return torch.stack((first, skipped), 1).to(torch.int32), none


@triton.jit
def _load_queries(side, row, tokens, exists):
    first = load_vector(side, row, tokens, exists, FAR)
    return first, load_vector(side, row + 1, tokens, exists, 0)


@triton.jit
def _test(shown, queries, keys):
    return shown & (queries[0] <= keys[0]) & ((keys[0] - queries[0]) % (queries[1] + 1) == 0)


@triton.jit
def _classify(queries, rows_exist, keys, columns_exist):
    """The result is exact: a tile's keys are contiguous, and a complete tile has more than one."""
    first, skipped = queries[0], queries[1]
    least = tl.min(tl.where(columns_exist, keys[0], FAR), 1)
    most = tl.max(tl.where(columns_exist, keys[0], -1), 1)
    all_first = tl.max(tl.where(rows_exist, first, -1), 1)[None, :]
    all_skipped = tl.max(tl.where(rows_exist, skipped, 0), 1)[None, :]
    KV_TILES: tl.constexpr = least.shape[0]
    tiles = tl.arange(0, KV_TILES)
    some = tl.zeros([KV_TILES, first.shape[0]], tl.int1)
    for i in tl.static_range(KV_TILES):
        from_, to = tl.min(tl.where(tiles == i, least, FAR), 0), tl.max(tl.where(tiles == i, most, -1), 0)
        last = to - (to - first) % (skipped + 1)  # the last position up to `to` that a row sees, if it sees one
        meets = tl.max(((first <= to) & (from_ <= last)).to(tl.int32), 1) != 0
        some = some | ((tiles == i)[:, None] & meets[None, :])
    return some == 0, (all_skipped == 0) & (all_first <= least[:, None]), some


@gluon.jit
def _keep(s, queries, keys):
    return gl.where(_test(True, queries, keys), s, float("-inf"))


PROGRESSIONS = Form(
    "progressions", 2, 0, _progressions, _load_queries, load_positions, _test, _classify, _keep, reads_positions=True
)
"""A query sees the keys at positions ``first + i * (skipped + 1)`` for i >= 0."""

FORMS = PROGRESSIONS, PROGRESSIONS
