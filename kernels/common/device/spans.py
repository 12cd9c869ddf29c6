"""From the bounds of intervals of positions to the spans of keys that queries see, on the device.

`common.relations.SPANS` says what they are, and `common.relations.spans` has the same in PyTorch.  Only integers are
computed, and whatever belongs to a batch element is computed from its own data.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["q_len", "kv_len", "lo", "hi"])
def write_spans(
    LEAST, MOST, SPANS, least_b, least_i, most_b, most_i, q_len, kv_len, lo, hi,
    HAS_LEAST: tl.constexpr, HAS_MOST: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per (batch element, BLOCK queries): the first position a query sees, and the one behind the last.

    LEAST, MOST: integers [batch, q_len], the bounds of the intervals, with their strides; one that there is not is not
    read.  lo, hi: of the band.  SPANS: int32, two of the QUERIES vectors of a batch element, [2, q_len].
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
    spans = SPANS + b * (QUERIES * q_len) + queries
    tl.store(spans, tl.minimum(tl.maximum(first, 0), last).to(tl.int32), mask=there)
    tl.store(spans + q_len, tl.minimum(tl.maximum(end, 0), last).to(tl.int32), mask=there)
