"""Split-KV attention for few queries: a program for each part of the keys, then a reduction over the parts.

Note [Parts of the keys]
    The main kernel has a CTA for a tile of queries of a head, so that few queries of few heads leave most of the GPU
    without work.  Here the keys of a kv head are cut into parts (splits), whose length depends only on the number of
    keys (`part_of`), and a program attends to one part with all queries of the group at once: K and V are read once for
    them.  Each part writes the maximum (base 2) of each row, its sum and its unnormalized output, all in fp32.
    `combine` reduces the parts of a row in one fixed tree, in which missing parts have weight zero.

    So the bits of a row are a function of the query, of the head's keys and values, and of three numbers: how many keys
    there are, and how many queries and query heads of a group, from which the rows of a tile follow.  Batch size, other
    heads, and the number of SMs have no part in it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest finite fp32, with which a base begins, see Note [Softmax] in `steps`."""


@triton.jit
def attend(
    q_ptr, k_ptr, v_ptr, acc_ptr, sums_ptr, q_strides, k_strides, v_strides, kv_heads, group, q_len, kv_len, part_len,
    parts, scale_log2, FORM,
):  # fmt: skip
    """Computes the attention of all queries of a group to one part of the keys, unnormalized; FORM: an `arguments.Few`.

    There is one program per (batch element, kv head, part).

    q: [batch, kv_heads * group, q_len, DIM]; k, v: [batch, kv_heads, kv_len, DIM or VALUE_DIM], unit strides in the
    last dimension.  Row r of a tile is query ``r % q_len`` of query head ``r // q_len`` of the group.  acc: fp32 [batch
    * kv_heads, parts, ROWS, BLOCK_DV]; sums: fp32 [batch * kv_heads, parts, 2, ROWS], row maxima (base 2) and row sums;
    only rows that exist are written.  Part p has the keys from ``p * part_len`` on, at least one; part_len is a
    multiple of BLOCK_KV.
    """
    gdc_launch_dependents()
    pid = tl.program_id(0)
    part = pid % parts
    head = pid // parts
    b = (head // kv_heads).to(tl.int64)
    h = (head % kv_heads).to(tl.int64)
    rows = tl.arange(0, FORM.ROWS)
    exists = rows < group * q_len
    columns = tl.arange(0, FORM.BLOCK_D)
    value_columns = tl.arange(0, FORM.BLOCK_DV)
    keys = tl.arange(0, FORM.BLOCK_KV)
    q_rows = q_ptr + b * q_strides.b + (h * group + rows // q_len) * q_strides.h + (rows % q_len) * q_strides.row
    keep = exists[:, None] & (columns < FORM.DIM)[None, :]
    q = tl.load(q_rows[:, None] + columns[None, :], mask=keep, other=0.0)
    first = part * part_len
    end = tl.minimum(first + part_len, kv_len)
    k_head = k_ptr + b * k_strides.b + h * k_strides.h
    v_head = v_ptr + b * v_strides.b + h * v_strides.h
    m = tl.full([FORM.ROWS], LOWEST, tl.float32)
    total = tl.zeros([FORM.ROWS], tl.float32)
    acc = tl.zeros([FORM.ROWS, FORM.BLOCK_DV], tl.float32)
    for start in range(first, end, FORM.BLOCK_KV):
        places = start + keys
        there = places < kv_len
        offsets = places.to(tl.int64)
        k_mask = there[:, None] & (columns < FORM.DIM)[None, :]
        k = tl.load(k_head + offsets[:, None] * k_strides.row + columns[None, :], mask=k_mask, other=0.0)
        v_mask = there[:, None] & (value_columns < FORM.VALUE_DIM)[None, :]
        v = tl.load(v_head + offsets[:, None] * v_strides.row + value_columns[None, :], mask=v_mask, other=0.0)
        s = tl.where(there[None, :], tl.dot(q, tl.trans(k)), float("-inf"))
        base = tl.maximum(m, tl.max(s, 1) * scale_log2)
        shrink = tl.math.exp2(m - base)
        p = tl.math.exp2(tl.math.fma(s, scale_log2, -base[:, None]))
        total = tl.math.fma(total, shrink, tl.sum(p, 1))
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        m = base
    place = (head.to(tl.int64) * parts + part) * FORM.ROWS
    tl.store(sums_ptr + place * 2 + rows, m, mask=exists)
    tl.store(sums_ptr + place * 2 + FORM.ROWS + rows, total, mask=exists)
    targets = acc_ptr + (place + rows)[:, None] * FORM.BLOCK_DV + value_columns[None, :]
    tl.store(targets, acc, mask=exists[:, None])


@triton.jit
def combine(
    acc_ptr, sums_ptr, out_ptr, lse_ptr, out_strides, q_heads, group, q_len, parts, FORM, PARTS: tl.constexpr
):  # fmt: skip
    """Reduces the parts of a row, one program per row, to out and the natural log-sum-exp.

    out: [batch, q_heads, q_len, VALUE_DIM]; lse: fp32 [batch * q_heads, q_len].  acc, sums: as `attend` writes them;
    PARTS: the largest number of parts, a power of two; FORM: an `arguments.Few`.
    """
    gdc_wait()  # for `attend`
    pid = tl.program_id(0)
    i = pid % q_len
    head = pid // q_len
    row = head % group * q_len + i
    numbers = tl.arange(0, PARTS)
    there = numbers < parts
    columns = tl.arange(0, FORM.BLOCK_DV)
    places = ((head // group).to(tl.int64) * parts + numbers) * FORM.ROWS
    m = tl.load(sums_ptr + places * 2 + row, mask=there, other=LOWEST)
    total = tl.load(sums_ptr + places * 2 + FORM.ROWS + row, mask=there, other=0.0)
    acc = tl.load(
        acc_ptr + (places + row)[:, None] * FORM.BLOCK_DV + columns[None, :], mask=there[:, None], other=0.0
    )  # fmt: skip
    base = tl.max(m, 0)
    share = tl.math.exp2(m - base)
    whole = tl.sum(total * share, 0)
    out = tl.sum(acc * share[:, None], 0) * (1.0 / whole)
    tl.store(lse_ptr + pid, (base + tl.math.log2(whole)) * 0.6931471805599453)
    b = (head // q_heads).to(tl.int64)
    h = (head % q_heads).to(tl.int64)
    target = out_ptr + b * out_strides.b + h * out_strides.h + i * out_strides.row
    tl.store(target + columns, out.to(out_ptr.dtype.element_ty), mask=columns < FORM.VALUE_DIM)
