"""`model.relations.EQUAL` on devices: a query sees the keys that have its number.

The numbers are replaced by *segment ids*, small integers that are equal where the numbers are (`device.segment_ids`).
Key validity (`TRUTH`) is merged into the first segment ids of a mask.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .form import FAR, HIDDEN, Form, Vectors, load_vector

if TYPE_CHECKING:
    from ...mask_data import MaskData

ALONE = tl.constexpr(-2)
"""The segment id of a query whose number no key has; no key has this segment id, and no query has `HIDDEN`."""


def _segment_ids(of: Vectors, data: "MaskData") -> tuple[Tensor, Tensor]:
    """The segment ids: the index of the first key with the same number; without numbers all are 0."""
    found = []
    for role, length in (("q", data.q_len), ("kv", data.kv_len)):
        segment_ids = torch.zeros(data.batch, length, dtype=torch.int32, device=data.device)
        if of.values:
            equal = of.values[role][:, :, None] == of.values["kv"][:, None, :]
            segment_ids = torch.where(equal.any(2), equal.to(torch.int32).argmax(2).to(torch.int32), -2)
        if role == "kv" and of.valid is not None:
            segment_ids = torch.where(of.valid != 0, segment_ids, -1)
        found.append(segment_ids[:, None])
    return found[0], found[1]


@triton.jit
def _load_queries(side, row, tokens, exists):
    return (load_vector(side, row, tokens, exists, ALONE),)


@triton.jit
def _load_keys(side, row, tokens, exists):
    return (load_vector(side, row, tokens, exists, HIDDEN),)


@triton.jit
def _test(shown, queries, keys):
    return shown & (queries[0] == keys[0])


@triton.jit
def _classify(queries, rows_exist, keys, columns_exist):
    """Compares the smallest and the largest segment ids of either tile."""
    of_rows, of_columns = queries[0], keys[0]
    q_low = tl.min(tl.where(of_rows < 0, FAR, of_rows), 1)[None, :]
    q_high = tl.max(of_rows, 1)[None, :]
    kv_low = tl.min(tl.where(of_columns < 0, FAR, of_columns), 1)[:, None]
    kv_high = tl.max(of_columns, 1)[:, None]
    # All existing rows, or all keys of a complete tile, have the one segment id; a last row counts for those missing.
    q_one = (tl.min(tl.where(rows_exist, of_rows, FAR), 1)[None, :]) == q_high
    kv_one = tl.min(of_columns, 1)[:, None] == kv_high
    one = q_one & kv_one & (q_high == kv_high)
    meet = (q_low == kv_low) | (q_low == kv_high) | (q_high == kv_low) | (q_high == kv_high)
    return (q_high < kv_low) | (kv_high < q_low), one, meet


@gluon.jit
def _keep(s, queries, keys):
    return keep_equal(s, queries[0], keys[0])


@gluon.jit
def keep_equal(s, a, b):
    """Returns the scores `s` where ``a == b``, else -inf.

    It is one inline assembly operation, as `_keep_below` in `hopper.forward.device.steps`.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred %keep;
        setp.eq.s32 %keep, $2, $3;
        selp.f32 $0, $1, 0fFF800000, %keep;
        }""",
        "=f,f,r,r",
        [s, a, b],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


SEGMENT_IDS = Form("segment_ids", 1, 1, _segment_ids, _load_queries, _load_keys, _test, _classify, _keep)
"""Segment ids: a query sees the keys with its own segment id.  An invalid key has the segment id `HIDDEN`."""

FORMS = SEGMENT_IDS, SEGMENT_IDS
