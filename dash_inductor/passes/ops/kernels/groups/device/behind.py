"""Writes NaN to the part of a grouped matmul's result after the last group, which the matmul leaves unwritten."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["groups", "rows", "columns"])
def fill_behind(
    OUT, OFFSETS, out_rows, groups, rows, columns, DIM: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Fills a matrix from the last offset on with NaN.

    PROGRAMS programs fill rows in turn; if there is nothing to fill, each only reads one number.

    OUT: [rows, columns], with `out_rows` elements between rows.  OFFSETS: integers [groups], ascending; everything from
    the last one on along DIM is filled.
    """
    last = tl.load(OFFSETS + groups - 1)
    if DIM == 0:
        first_row, first_column = last.to(tl.int64), tl.cast(0, tl.int64)
    else:
        first_column = last.to(tl.int64)
        first_row = tl.where(first_column < columns, 0, rows).to(tl.int64)
    for row in range(first_row + tl.program_id(0), rows, PROGRAMS):
        for start in range(first_column, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            nothing = tl.full([BLOCK], float("nan"), tl.float32).to(OUT.dtype.element_ty)
            tl.store(OUT + tl.cast(row, tl.int64) * out_rows + column, nothing, mask=column < columns)
