"""Building blocks of the portable kernels: tile loads, the mask inside a tile, softmax probabilities.

Only `triton.jit` functions live here: their text is pasted into Inductor's template (see `source.py`).
"""

import triton
import triton.language as tl


@triton.jit
def head_start(ptr, b, h, strides):
    """Pointer to the first row of head `h` of batch element `b`; strides: (batch, head, ...)."""
    return ptr + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]


@triton.jit
def load_tile(
    ptr, rows, n_rows, row_stride, col_stride, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr
):
    """Rows `rows` of a [n_rows, HEAD_DIM] matrix as a [len(rows), BLOCK_D] tile, zeros outside (EVEN: no row is)."""
    cols = tl.arange(0, BLOCK_D)
    ptrs = ptr + rows[:, None] * row_stride + cols[None, :] * col_stride
    if EVEN and HEAD_DIM == BLOCK_D:
        return tl.load(ptrs)
    elif EVEN:
        return tl.load(ptrs, mask=cols[None, :] < HEAD_DIM, other=0.0)
    elif HEAD_DIM == BLOCK_D:
        return tl.load(ptrs, mask=rows[:, None] < n_rows, other=0.0)
    else:
        return tl.load(ptrs, mask=(rows[:, None] < n_rows) & (cols[None, :] < HEAD_DIM), other=0.0)


@triton.jit
def load_rows(ptr, rows, n_rows, stride, other, EVEN: tl.constexpr):
    """One fp32 value per row; `other` outside."""
    if EVEN:
        return tl.load(ptr + rows * stride)
    else:
        return tl.load(ptr + rows * stride, mask=rows < n_rows, other=other)


@triton.jit
def visible(q_rows, kv_rows, kv_len, lo, hi, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """Which (query, key) pairs of a tile the mask lets through; `q_rows` and `kv_rows` broadcast against each other."""
    keep = (kv_rows < kv_len) & (q_rows >= 0)
    if HAS_LO:
        keep = keep & (q_rows - kv_rows >= lo)
    if HAS_HI:
        keep = keep & (q_rows - kv_rows <= hi)
    return keep
