"""Segment sums to few rows by matmuls with one-hot matrices, in a fixed order and without a sort.

A program handles a chunk of entries, whose length is a constant, and some of the columns.  It multiplies the one-hot
matrix of the keys, [rows, entries], by the values, and writes a part: the sums of its chunk.  Parts are then added
group by group, in order.  So bits depend only on the keys, the values and their shape.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count", "chunks", "rows"])
def sum_chunks(
    VALUES, KEYS, PARTS, values_b, values_n, values_c, count, chunks, rows, columns,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums the values of a chunk by key, by a matmul with the one-hot matrix of the keys.

    One program per batch element, COLUMNS columns and CHUNK entries; chunks are adjacent in the grid.

    VALUES: [batch, count, columns] with its strides, of 16 or 32 bits.  KEYS: integers [count]; entries with the key
    `rows`, which is at most ROWS, are skipped and not read.  PARTS: fp32 [batch, chunks, rows, columns].

    The loop only loads and multiplies, so that loads can run ahead of products.  A non-finite value makes the sums of
    its column non-finite in every row; in that case the chunk is summed again, row by row if necessary.
    """
    program = tl.program_id(0)
    chunk, other = program % chunks, program // chunks
    tiles = tl.cdiv(columns, COLUMNS)
    tile, b = other % tiles, (other // tiles).to(tl.int64)
    first, end = chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, count)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    at = VALUES + b * values_b + column.to(tl.int64)[None, :] * values_c
    row = tl.arange(0, ROWS)
    entry = first + tl.arange(0, CHUNK)
    tl.device_assert(tl.load(KEYS + entry, mask=entry < end, other=0).to(tl.int32) <= rows, "index out of bounds")
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(first, end, STEP):
        n = start + tl.arange(0, STEP)
        key = tl.load(KEYS + n, mask=n < end, other=rows).to(tl.int32)
        value = tl.load(at + n.to(tl.int64)[:, None] * values_n, mask=(key < rows)[:, None] & inside[None, :], other=0)
        chosen = tl.where(row[:, None] == key[None, :], 1.0, 0.0).to(value.dtype)
        total = tl.dot(chosen, value, total, input_precision="ieee")
    is_finite = (tl.abs(total) < float("inf")).to(tl.int32)
    if tl.min(tl.min(is_finite, 1), 0) == 0:
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in tl.range(first, end, 16, num_stages=1):  # few registers
            n = start + tl.arange(0, 16)
            key = tl.load(KEYS + n, mask=n < end, other=rows).to(tl.int32)
            seen = (key < rows)[:, None] & inside[None, :]
            value = tl.load(at + n.to(tl.int64)[:, None] * values_n, mask=seen, other=0)
            exact = value.to(tl.float32)
            finite = tl.where(tl.abs(exact) < float("inf"), exact, 0.0).to(value.dtype)
            chosen = tl.where(row[:, None] == key[None, :], 1.0, 0.0).to(value.dtype)
            total = tl.dot(chosen, finite, total, input_precision="ieee")
            rest = tl.where(tl.abs(exact) < float("inf"), 0.0, exact)
            if tl.max(tl.max((rest != 0).to(tl.int32), 1), 0) > 0:
                for r in range(rows):
                    of_row = tl.sum(tl.where((key == r)[:, None], rest, 0.0), 0)
                    total += tl.where(row[:, None] == r, of_row[None, :], 0.0)
    part = PARTS + ((b * chunks + chunk) * rows + row[:, None]) * columns + column[None, :]
    tl.store(part, total, mask=(row < rows)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["count", "groups", "size"])
def add_parts(
    PARTS, OUT, count, groups, size, GROUP: tl.constexpr, BLOCK: tl.constexpr, HAS_BASE: tl.constexpr
):  # fmt: skip
    """Adds the partial sums of GROUP consecutive chunks, in order.

    One program per batch element, BLOCK elements and group of chunks.  PARTS: fp32 [batch, count, size], the partial
    sums of all chunks.  OUT: [batch, groups, size], written, or added to if HAS_BASE.
    """
    program = tl.program_id(0)
    group, other = program % groups, program // groups
    size = tl.cast(size, tl.int64)
    blocks = tl.cdiv(size, BLOCK)
    at = other % blocks * BLOCK + tl.arange(0, BLOCK)
    b = other // blocks
    inside = at < size
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(group * GROUP, tl.minimum((group + 1) * GROUP, count)):
        total += tl.load(PARTS + (b * count + i) * size + at, mask=inside, other=0.0)
    out = OUT + (b * groups + group) * size + at
    if HAS_BASE:
        total += tl.load(out, mask=inside, other=0).to(tl.float32)
    tl.store(out, total.to(OUT.dtype.element_ty), mask=inside)
