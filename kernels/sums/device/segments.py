"""Sums of the rows of each segment of a sorted list, in a fixed order, without atomics.

The list is cut into chunks of as many entries as its shape says.  A program sums the segments of one chunk for some of
the columns, by a scan whose order is that of the compiled code.  A segment that lies in one chunk is written where it
belongs.  Of others each chunk writes a *part*, of which it has two at most: one of the segment that it begins within,
one of the segment that it ends within.  The parts of all chunks are a sorted list again, shorter by half the length of
a chunk, which the same kernel sums next, until there is a single chunk.

So bits follow from the keys, the values and their shape.  They depend on no grid and no number of SMs, and rows of
another batch element change none.
"""

import triton
import triton.language as tl


@triton.jit
def _joined(left_begins, left, right_begins, right):
    """The sum of two neighbouring pieces of a list, from the last segment that begins in them."""
    return left_begins | right_begins, tl.where(right_begins != 0, right, left + right)


@triton.jit(do_not_specialize=["count", "chunks", "rows"])
def add_segments(
    VALUES, KEYS, ORDER, OUT, PARTS, PART_KEYS, values_b, values_n, values_c, count, chunks, rows, columns,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr, HAS_ORDER: tl.constexpr, HAS_BASE: tl.constexpr, IS_LAST: tl.constexpr,
):  # fmt: skip
    """One program per batch element, COLUMNS columns and CHUNK entries of the list; chunks are next to each other.

    VALUES: [batch, n, columns] with its strides; KEYS: integers [count], sorted, `rows` where an entry does not count;
    ORDER: the place in VALUES of each entry, int64 [count], where that is not its own.  OUT: [batch, rows, columns],
    which gets the sums of all segments that end here, added to what is there with HAS_BASE.  PARTS, PART_KEYS: the next
    list, [batch, 2 * chunks, columns] and int32 [2 * chunks], unless IS_LAST.
    """
    program = tl.program_id(0)
    chunk, other = program % chunks, program // chunks
    tiles = tl.cdiv(columns, COLUMNS)
    tile, b = other % tiles, (other // tiles).to(tl.int64)
    n = chunk * CHUNK + tl.arange(0, CHUNK)
    there = n < count
    key = tl.load(KEYS + n, mask=there, other=0).to(tl.int32)
    previous = tl.load(KEYS + n - 1, mask=there & (n > 0), other=0).to(tl.int32)
    following = tl.load(KEYS + n + 1, mask=n + 1 < count, other=0).to(tl.int32)
    tl.device_assert(key <= rows, "index out of bounds")
    begins = (n == 0) | (key != previous)
    ends = there & ((n + 1 == count) | (key != following))
    counts = there & (key < rows)

    place = n.to(tl.int64)
    if HAS_ORDER:
        place = tl.load(ORDER + n, mask=there, other=0)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    at = b * values_b + place[:, None] * values_n + column.to(tl.int64)[None, :] * values_c
    value = tl.load(VALUES + at, mask=counts[:, None] & inside[None, :], other=0).to(PARTS.dtype.element_ty)
    flags = tl.broadcast_to(begins.to(tl.int32)[:, None], [CHUNK, COLUMNS])
    _, total = tl.associative_scan((flags, value), 0, _joined)

    from_here = n >= tl.min(tl.where(begins, n, count), 0)  # the segment of an entry begins in this chunk
    whole = (ends & from_here & counts)[:, None] & inside[None, :]
    out = OUT + (b * rows + key.to(tl.int64))[:, None] * columns + column[None, :]
    result = total
    if HAS_BASE:
        result += tl.load(out, mask=whole, other=0).to(PARTS.dtype.element_ty)
    tl.store(out, result.to(OUT.dtype.element_ty), mask=whole)

    if not IS_LAST:
        is_open = there & (n == chunk * CHUNK + CHUNK - 1) & (ends == 0)  # goes on in the next chunk
        first = there & (from_here == 0) & (ends | is_open)
        part = PARTS + (b * (2 * chunks) + 2 * chunk) * columns + tl.zeros([CHUNK], tl.int64)[:, None] + column[None, :]
        tl.store(part, total, mask=first[:, None] & inside[None, :])
        # a segment that goes through the whole chunk is the first one, and nothing is added to it
        rest = tl.where(from_here[:, None], total, 0.0)
        tl.store(part + columns, rest, mask=is_open[:, None] & inside[None, :])
        writes = (b == 0) & (tile == 0)
        first_key = tl.max(tl.where(first, key, -1), 0)
        open_key = tl.max(tl.where(is_open, key, -1), 0)
        tl.store(PART_KEYS + 2 * chunk, tl.where(first_key < 0, rows, first_key), mask=writes)
        tl.store(PART_KEYS + 2 * chunk + 1, tl.where(open_key < 0, rows, open_key), mask=writes)
