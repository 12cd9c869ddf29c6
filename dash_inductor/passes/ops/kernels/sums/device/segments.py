"""Sums the rows of each segment of a sorted list, in a fixed order, without atomics.

The list is divided into chunks, whose length depends only on the shape.  A program sums the segments of one chunk for
some of the columns: narrow rows by a scan, whose order is that of the compiled code; wide rows by a walk from entry to
entry, which prefetches several rows.  A segment that lies within one chunk is written to its row.  Of other segments,
each chunk writes a *part*.  It has at most two: one of the segment in which it begins, and one of the segment in which
it ends.  The parts of all chunks are again a sorted list, shorter by half the length of a chunk, which the same kernel
sums next, until there is a single chunk.

So bits depend only on the keys, the values and their shape: not on the grid or the number of SMs, and not on other
batch elements.
"""

import triton
import triton.language as tl


@triton.jit
def _joined(left_begins, left, right_begins, right):
    """Combines two neighbouring pieces of a list in the scan: the sum since the last segment that begins in them."""
    return left_begins | right_begins, tl.where(right_begins != 0, right, left + right)


@triton.jit(do_not_specialize=["count", "chunks", "rows", "limit"])
def scan_segments(
    VALUES, KEYS, ORDER, OUT, PARTS, PART_KEYS, values_b, values_n, values_c, count, chunks, rows, limit, columns,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr, HAS_ORDER: tl.constexpr, HAS_BASE: tl.constexpr, IS_LAST: tl.constexpr,
):  # fmt: skip
    """Sums the rows of each segment (entries with equal keys) in a chunk of the sorted list by a scan; for narrow rows.

    The list is KEYS.  One program per batch element, COLUMNS columns and chunk of CHUNK entries; chunks are adjacent in
    the grid.

    VALUES: [batch, limit, columns] with its strides.  KEYS: integers [count], sorted; entries with the key `rows` are
    skipped.  ORDER: integers [count], the row of VALUES of each entry, if HAS_ORDER; else an entry has its own row.
    OUT: [batch, rows, columns], gets the sums of all segments that end here, added to its contents if HAS_BASE.  PARTS,
    PART_KEYS: the next list, [batch, 2 * chunks, columns] and int32 [2 * chunks], unless IS_LAST.
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
        place = tl.load(ORDER + n, mask=there, other=0).to(tl.int64)
        tl.device_assert((place >= 0) & (place < limit), "index out of bounds")
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


@triton.jit
def _entry(VALUES, KEYS, ORDER, n, count, rows, values_n, values_c, column, inside, HAS_ORDER: tl.constexpr):
    """The key of an entry (`rows` after the end of the list) and its value (zeros if the entry is skipped)."""
    there = n < count
    key = tl.where(there, tl.load(KEYS + n, mask=there, other=0).to(tl.int32), rows)
    place = tl.cast(n, tl.int64)
    if HAS_ORDER:
        place = tl.load(ORDER + n, mask=there, other=0).to(tl.int64)
    value = tl.load(VALUES + place * values_n + column.to(tl.int64) * values_c, mask=inside & (key < rows), other=0)
    return key, value


@triton.jit
def _finish(OUT, PART, total, key, is_whole, is_over, rows, columns, column, inside, HAS_BASE: tl.constexpr):
    """Writes the sum of a segment that `is_over`: to its row if this chunk has it all, else as first part."""
    out = OUT + key.to(tl.int64) * columns + column
    whole = inside & (is_over & is_whole & (key < rows))
    result = total
    if HAS_BASE:
        result += tl.load(out, mask=whole, other=0).to(total.dtype)
    tl.store(out, result.to(OUT.dtype.element_ty), mask=whole)
    tl.store(PART + column, total, mask=inside & (is_over & (is_whole == 0)))


@triton.jit
def _step(
    OUT, PART, total, key, is_whole, first_key, next_key, value, rows, columns, column, inside, HAS_BASE: tl.constexpr
):  # fmt: skip
    """Advances to the next entry; returns sum and key of its segment, whether that began here, and the first key."""
    is_over = next_key != key
    _finish(OUT, PART, total, key, is_whole, is_over, rows, columns, column, inside, HAS_BASE)
    first_key = tl.where(is_over & (is_whole == 0), key, first_key)
    total = tl.where(is_over, 0.0, total) + value.to(total.dtype)
    return total, next_key, is_whole | is_over, first_key


@triton.jit(do_not_specialize=["count", "chunks", "rows", "limit"])
def walk_segments(
    VALUES, KEYS, ORDER, OUT, PARTS, PART_KEYS, values_b, values_n, values_c, count, chunks, rows, limit, columns,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr, HAS_ORDER: tl.constexpr, HAS_BASE: tl.constexpr, IS_LAST: tl.constexpr,
):  # fmt: skip
    """Sums the segments of a chunk of the list by a walk from entry to entry, for wide rows.

    One program, of one warp, per batch element, COLUMNS columns and CHUNK entries (a multiple of eight).  The arguments
    are those of `scan_segments`; the results are the same except for the order of additions.
    """
    program = tl.program_id(0)
    chunk, other = program % chunks, program // chunks
    tiles = tl.cdiv(columns, COLUMNS)
    tile, b = other % tiles, (other // tiles).to(tl.int64)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    VALUES += b * values_b
    OUT += b * rows * columns
    part = PARTS + (b * (2 * chunks) + 2 * chunk) * columns
    begin, end = chunk * CHUNK, (chunk + 1) * CHUNK
    n = begin + tl.arange(0, CHUNK)
    tl.device_assert(tl.load(KEYS + n, mask=n < count, other=0).to(tl.int32) <= rows, "index out of bounds")
    if HAS_ORDER:
        place = tl.load(ORDER + n, mask=n < count, other=0).to(tl.int64)
        tl.device_assert((place >= 0) & (place < limit), "index out of bounds")

    key = tl.load(KEYS + begin).to(tl.int32)
    is_whole = key != tl.load(KEYS + begin - 1, mask=begin > 0, other=-1).to(tl.int32)
    first_key, total = rows, tl.zeros([COLUMNS], PARTS.dtype.element_ty)
    for n in range(begin, end, 8):
        k0, v0 = _entry(VALUES, KEYS, ORDER, n, count, rows, values_n, values_c, column, inside, HAS_ORDER)
        k1, v1 = _entry(VALUES, KEYS, ORDER, n + 1, count, rows, values_n, values_c, column, inside, HAS_ORDER)
        k2, v2 = _entry(VALUES, KEYS, ORDER, n + 2, count, rows, values_n, values_c, column, inside, HAS_ORDER)
        k3, v3 = _entry(VALUES, KEYS, ORDER, n + 3, count, rows, values_n, values_c, column, inside, HAS_ORDER)
        k4, v4 = _entry(VALUES, KEYS, ORDER, n + 4, count, rows, values_n, values_c, column, inside, HAS_ORDER)
        k5, v5 = _entry(VALUES, KEYS, ORDER, n + 5, count, rows, values_n, values_c, column, inside, HAS_ORDER)
        k6, v6 = _entry(VALUES, KEYS, ORDER, n + 6, count, rows, values_n, values_c, column, inside, HAS_ORDER)
        k7, v7 = _entry(VALUES, KEYS, ORDER, n + 7, count, rows, values_n, values_c, column, inside, HAS_ORDER)
        total, key, is_whole, first_key = _step(
            OUT, part, total, key, is_whole, first_key, k0, v0, rows, columns, column, inside, HAS_BASE
        )
        total, key, is_whole, first_key = _step(
            OUT, part, total, key, is_whole, first_key, k1, v1, rows, columns, column, inside, HAS_BASE
        )
        total, key, is_whole, first_key = _step(
            OUT, part, total, key, is_whole, first_key, k2, v2, rows, columns, column, inside, HAS_BASE
        )
        total, key, is_whole, first_key = _step(
            OUT, part, total, key, is_whole, first_key, k3, v3, rows, columns, column, inside, HAS_BASE
        )
        total, key, is_whole, first_key = _step(
            OUT, part, total, key, is_whole, first_key, k4, v4, rows, columns, column, inside, HAS_BASE
        )
        total, key, is_whole, first_key = _step(
            OUT, part, total, key, is_whole, first_key, k5, v5, rows, columns, column, inside, HAS_BASE
        )
        total, key, is_whole, first_key = _step(
            OUT, part, total, key, is_whole, first_key, k6, v6, rows, columns, column, inside, HAS_BASE
        )
        total, key, is_whole, first_key = _step(
            OUT, part, total, key, is_whole, first_key, k7, v7, rows, columns, column, inside, HAS_BASE
        )

    following = tl.load(KEYS + end, mask=end < count, other=-1).to(tl.int32)
    is_open = following == key  # goes on in the next chunk
    _finish(OUT, part, total, key, is_whole, is_open == 0, rows, columns, column, inside, HAS_BASE)
    if not IS_LAST:
        # a segment that goes through the whole chunk is the first part, and nothing is added to it
        tl.store(part + column, total, mask=inside & (is_open & (is_whole == 0)))
        rest = tl.where(is_whole, total, 0.0)
        tl.store(part + columns + column, rest, mask=inside & is_open)
        if (b == 0) & (tile == 0):
            tl.store(PART_KEYS + 2 * chunk, tl.where(is_whole, first_key, key))
            tl.store(PART_KEYS + 2 * chunk + 1, tl.where(is_open, key, rows))
