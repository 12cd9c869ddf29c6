"""Building blocks of the portable kernels: tile loads, the mask inside a tile, softmax probabilities.

Only `triton.jit` functions live here: their text is pasted into Inductor's template (see `templates.py`).

Note [Data operands]
    Kernels take what masks and scores read of data as one tuple `data` = (keys, ids, dense, bias, placed).  A member
    belongs to a kernel that has the constexpr flag behind it; in others it is never read, and may be anything of this
    form.

    keys (HAS_KEYS): (KEYS, strides (b, h, key)).  KEYS: int32 [batch, kv heads, kv_len]; no row sees a key whose entry
    is zero.

    ids (HAS_SEGMENTS): (Q_IDS, KV_IDS, strides (b, token) of the first, of the second), int32 or int64 [batch, q_len]
    and [batch, kv_len]; a row sees only keys of its own id.

    Neither has elements of less than 32 bits.  From the narrowest load that an operand of a matmul depends on, be it by
    a mask, Triton derives which elements along k an instruction of sm_80 multiplies (`kWidth`), and so the order of the
    sum: a vector of bools would give other bits than no vector.

    dense (HAS_DENSE): (DENSE, strides (b, h, row, key)), bool or uint8 [batch, q heads, q_len, kv_len]; a row sees only
    keys whose entry is not zero.

    bias (HAS_BIAS): (BIAS, strides (b, h, row, key)), floats [batch, q heads, q_len, kv_len], which are added to the
    scaled scores.  Any values: a score of -inf has the probability zero.  A row all of whose scores are -inf counts as
    one that sees no key, but a key that only a bias of -inf hides is read.

    placed (PLACED, the rows of a row block, 0 where tokens are rows): (PLACE, COUNT, tokens), int32 [row blocks] twice,
    and the number of tokens.  Lengths are the mask's, also the lengths of ids, log-sum-exps and deltas; all else has
    tokens, which `tokens_of` finds.  A row without a token is not read and not written.

Note [Log-sum-exp in two parts]
    A bias may be so large that a log-sum-exp in fp32 keeps nothing of the number of keys: all scores of a row may be
    `finfo.min`, which is a uniform softmax.  So the forward of a call with a bias writes two numbers per row, the
    largest score and the logarithm in base 2 of the sum of exp(score - largest), and the backward reads both.  LSE is
    then [batch, q heads, 2 * q_len]: all rows of the first number, then all of the second.

Note [Rows of a tile of pairs]
    The dk/dv kernel multiplies by P and dS from the left, with a row for each key.  Matmuls give them that way (BY_KEY,
    [keys, queries]), so that they stay in registers.  But where there is a bias, tiles have a row for each query, as
    memory has (not BY_KEY, [queries, keys]): the bias is loaded ahead into shared memory as it is, and what there is
    once for each query is in registers once for each row.  P and dS are then transposed through shared memory, rounded
    to the dtype of the operands.
"""

import triton
import triton.language as tl

from ...common.device.rows import tokens_of


@triton.jit
def head_start(ptr, b, h, strides):
    """Pointer to the first row of head `h` of batch element `b`; strides: (batch, head, ...)."""
    return ptr + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]


@triton.jit
def load_tile(
    ptr, rows, first, end, row_stride, col_stride, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr
):
    """Rows `rows` of a matrix with HEAD_DIM columns as a [len(rows), BLOCK_D] tile.

    Zeros stand for rows outside first .. end-1, which are not read (EVEN: there are none), and for further columns.
    """
    cols = tl.arange(0, BLOCK_D)
    inside = (rows >= first) & (rows < end)
    ptrs = ptr + rows[:, None] * row_stride + cols[None, :] * col_stride
    if EVEN and HEAD_DIM == BLOCK_D:
        return tl.load(ptrs)
    elif EVEN:
        return tl.load(ptrs, mask=cols[None, :] < HEAD_DIM, other=0.0)
    elif HEAD_DIM == BLOCK_D:
        return tl.load(ptrs, mask=inside[:, None], other=0.0)
    else:
        return tl.load(ptrs, mask=inside[:, None] & (cols[None, :] < HEAD_DIM), other=0.0)


@triton.jit
def load_chosen(ptr, rows, chosen, row_stride, col_stride, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """As `load_tile`, with zeros for the rows that are not `chosen` (booleans, one per row), which are not read."""
    cols = tl.arange(0, BLOCK_D)
    ptrs = ptr + rows[:, None] * row_stride + cols[None, :] * col_stride
    if HEAD_DIM == BLOCK_D:
        return tl.load(ptrs, mask=chosen[:, None], other=0.0)
    else:
        return tl.load(ptrs, mask=chosen[:, None] & (cols[None, :] < HEAD_DIM), other=0.0)


@triton.jit
def place_rows(data, rows, end, PLACED: tl.constexpr):
    """(the tokens of `rows`, which of them have one) under a mask of `end` rows, as `tokens_of` gives them."""
    _keys, _ids, _dense, _bias, placed = data
    PLACE, COUNT, _tokens = placed
    return tokens_of(PLACE, COUNT, rows, end, PLACED)


@triton.jit
def id_range(ids, exists, PLACED: tl.constexpr):
    """The smallest and the largest of the `ids` of a tile's rows that have a token, none without; for `in_range`."""
    if PLACED:
        return tl.min(tl.where(exists, ids, 2**30), 0), tl.max(tl.where(exists, ids, -1), 0)
    else:
        return 0, 0


@triton.jit
def in_range(chosen, ids, low, high, PLACED: tl.constexpr):
    """Whether rows are `chosen` and, of a mask of rows, may have the id of a row of the other tile: low, high are its
    `id_range`.

    A tile has rows of one document alone, so that nothing of another one is read, whatever the walk visits.
    """
    if PLACED:
        return chosen & (ids >= low) & (ids <= high)
    else:
        return chosen


@triton.jit
def load_queries(
    ptr, rows, first, end, tokens, exists, row_stride, col_stride,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """A tile of Q, dO or the output: as `load_tile`; of a mask of rows the `tokens` of the rows that have one."""
    if PLACED:
        return load_chosen(ptr, tokens, exists, row_stride, col_stride, HEAD_DIM, BLOCK_D)
    else:
        return load_tile(ptr, rows, first, end, row_stride, col_stride, HEAD_DIM, BLOCK_D, EVEN)


@triton.jit
def load_valid(
    ptr, rows, first, end, valid, row_stride, col_stride,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr, HAS_KEYS: tl.constexpr,
):  # fmt: skip
    """A tile of K or V: as `load_tile`; with a vector of keys, zeros also stand for those that are not `valid`."""
    if HAS_KEYS:
        return load_chosen(ptr, rows, valid, row_stride, col_stride, HEAD_DIM, BLOCK_D)
    else:
        return load_tile(ptr, rows, first, end, row_stride, col_stride, HEAD_DIM, BLOCK_D, EVEN)


@triton.jit
def load_keys(ptr, b, h, kv_rows, first, end, strides, HAS_KEYS: tl.constexpr):
    """Whether the keys `kv_rows` of kv head `h` are valid, as booleans; all are without a vector of keys.

    ptr: int32 [batch, kv heads, kv_len], of which nothing outside first .. end-1 is read: those keys are not valid.
    """
    if HAS_KEYS:
        ptrs = head_start(ptr, b, h, strides) + kv_rows * strides[2]
        return tl.load(ptrs, mask=(kv_rows >= first) & (kv_rows < end), other=0) != 0
    else:
        return kv_rows >= 0


@triton.jit
def load_ids(ptr, b, rows, first, end, strides, HAS_SEGMENTS: tl.constexpr):
    """The segment ids of the queries or keys `rows` of batch element `b`; any integers where there are no segments.

    ptr: integers [batch, length], of which nothing outside first .. end-1 is read.  Ids of int32 stay as they are, all
    others become int64, so that ids of any two types are compared by their values.
    """
    if HAS_SEGMENTS:
        ptrs = ptr + b.to(tl.int64) * strides[0] + rows * strides[1]
        ids = tl.load(ptrs, mask=(rows >= first) & (rows < end), other=0)
        if ids.dtype == tl.int32:
            return ids
        else:
            return ids.to(tl.int64)
    else:
        return rows


@triton.jit
def load_of_keys(
    data, b, h, kv_rows, first, end, exists, HAS_KEYS: tl.constexpr, HAS_SEGMENTS: tl.constexpr, PLACED: tl.constexpr
):
    """(which of the keys `kv_rows` are valid, their segment ids), as `load_keys` and `load_ids` give them.

    exists: as of `place_rows`; of a mask of rows those are valid that have a token.
    """
    keys, ids, _dense, _bias, _placed = data
    KEYS, keys_strides = keys
    _q_ids, KV_IDS, _q_ids_strides, kv_ids_strides = ids
    valid = exists if PLACED else load_keys(KEYS, b, h, kv_rows, first, end, keys_strides, HAS_KEYS)
    return valid, load_ids(KV_IDS, b, kv_rows, first, end, kv_ids_strides, HAS_SEGMENTS)


@triton.jit
def load_of_queries(data, b, q_rows, first, end, HAS_SEGMENTS: tl.constexpr):
    """The segment ids of the queries `q_rows`, as `load_ids` gives them."""
    _keys, ids, _dense, _bias, _placed = data
    Q_IDS, _kv_ids, q_ids_strides, _kv_ids_strides = ids
    return load_ids(Q_IDS, b, q_rows, first, end, q_ids_strides, HAS_SEGMENTS)


@triton.jit
def load_pairs(operand, b, hq, q_rows, kv_rows, q_end, kv_end):
    """The elements of `operand`, a pointer and its strides (b, h, row, key), of the pairs of a tile.

    `q_rows` broadcast against `kv_rows`; zeros stand for what is past q_end or kv_end, which is not read.
    """
    ptr, strides = operand
    ptrs = head_start(ptr, b, hq, strides) + q_rows * strides[2] + kv_rows * strides[3]
    return tl.load(ptrs, mask=(q_rows < q_end) & (kv_rows < kv_end), other=0)


@triton.jit
def load_shown(data, b, hq, q_rows, kv_rows, q_end, kv_end, HAS_DENSE: tl.constexpr):
    """Whether a dense mask shows the pairs of a tile, as booleans; all are shown without one."""
    _keys, _ids, dense, _bias, _placed = data
    if HAS_DENSE:
        return load_pairs(dense, b, hq, q_rows, kv_rows, q_end, kv_end) != 0
    else:
        return kv_rows >= 0


@triton.jit
def load_bias(data, b, hq, q_rows, kv_rows, q_end, kv_end, HAS_BIAS: tl.constexpr):
    """The bias of the scores of a tile, in fp32; zero without a bias."""
    _keys, _ids, _dense, bias, _placed = data
    if HAS_BIAS:
        return load_pairs(bias, b, hq, q_rows, kv_rows, q_end, kv_end).to(tl.float32)
    else:
        return 0.0


@triton.jit
def prefetch_bias(
    data, b, hq, q_tile, kv, wanted, q_len, kv_len,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, HAS_BIAS: tl.constexpr, INDEX: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Ask for the bias of tile pair (q_tile, kv) to be in the L2 cache soon, if that is `wanted`.

    A loop's own loads ahead are for data in the cache.  A bias comes from the GPU's memory, few bytes of each of many
    rows, and takes longer than a step or two.
    """
    _keys, _ids, _dense, bias, _placed = data
    if HAS_BIAS and wanted:
        ptr, strides = bias
        # 64 bytes for each request, and the tile's columns at least once
        EVERY: tl.constexpr = min(512 // ptr.dtype.element_ty.primitive_bitwidth, BLOCK_KV)
        rows = tl.minimum(q_tile * BLOCK_Q + tl.arange(0, BLOCK_Q).to(INDEX), q_len - 1)
        keys = tl.minimum(kv * BLOCK_KV + tl.arange(0, BLOCK_KV // EVERY).to(INDEX) * EVERY, kv_len - 1)
        pointers = head_start(ptr, b, hq, strides) + rows[:, None] * strides[2] + keys[None, :] * strides[3]
        prefetch(pointers, INTERPRET)


@triton.jit
def prefetch(pointers, INTERPRET: tl.constexpr):
    """Ask for what lies at these addresses, all of them readable, to be in the L2 cache soon.

    In a loop that is pipelined it must stand in a branch: the compiler cannot make anything else of it conditional.
    """
    if not INTERPRET:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def load_sums(lse_head, q_rows, first, end, q_len, stride, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The sum that `probabilities` needs of each row: its log-sum-exp in base 2, or both parts where there is a bias.

    lse_head: the log-sum-exps of a head, see Note [Log-sum-exp in two parts].  Rows outside first .. end-1 are not read
    and have no probabilities, nor have rows that see no key, where there is a bias.
    """
    lse = load_rows(lse_head, q_rows, first, end, stride, float("inf"), EVEN)
    if HAS_BIAS:
        lse = tl.where(lse == float("-inf"), float("inf"), lse)
        return lse, load_rows(lse_head + q_len * stride, q_rows, first, end, stride, 0.0, EVEN)
    else:
        return lse * 1.4426950408889634, lse


@triton.jit
def probabilities(s, bias, lse, excess, scale, HAS_BIAS: tl.constexpr):
    """The probabilities of a tile of products of query and key; lse, excess: as `load_sums` gives them."""
    log2e = 1.4426950408889634
    if HAS_BIAS:
        return tl.math.exp2(tl.math.fma(tl.math.fma(s, scale, bias) - lse, log2e, -excess))
    else:
        return tl.math.exp2(s * (scale * log2e) - lse)


@triton.jit
def rounded_product(x, y, operand):
    """x * y, which is rounded before anything is added to it, if it becomes an operand of a matmul beside `operand`.

    A matmul of fp32 is made of three of tf32: it subtracts from an operand what tf32 holds of it.  The compiler would
    fuse that with a multiplication where nothing is between the two, such as the choice that a mask makes: then the
    bits of a pair that is seen would depend on whether other pairs of the tile are.
    """
    if operand.dtype == tl.float32:
        return tl.math.fma(x, y, 0.0)
    else:
        return x * y


@triton.jit
def row_sums(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums of the rows of [ROWS, COLUMNS], in an order of their own, however the threads hold the tile.

    Two numbers are added at a time: first the numbers that a thread has of a matmul's result, then four threads' sums.
    """
    sums = tl.sum(tl.reshape(tile, [ROWS, COLUMNS // 8, 4, 2]), 3)
    for i in tl.static_range((COLUMNS // 8).bit_length() - 1):
        sums = tl.sum(tl.reshape(sums, [ROWS, COLUMNS >> (4 + i), 2, 4]), 2)
    return tl.sum(tl.sum(tl.reshape(sums, [ROWS, 2, 2]), 2), 1)


@triton.jit
def by_query(x, BY_KEY: tl.constexpr):
    """A vector with one entry for each query, as it broadcasts to a tile of pairs; Note [Rows of a tile of pairs]."""
    if BY_KEY:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def by_key(x, BY_KEY: tl.constexpr):
    """A vector with one entry for each key, as it broadcasts to a tile of pairs."""
    if BY_KEY:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit
def pair_products(of_queries, of_keys, BY_KEY: tl.constexpr, PRECISION: tl.constexpr):
    """The products of the rows [queries, columns] and [keys, columns] of two tiles, a tile of pairs."""
    if BY_KEY:
        return tl.dot(of_keys, tl.trans(of_queries), input_precision=PRECISION)
    else:
        return tl.dot(of_queries, tl.trans(of_keys), input_precision=PRECISION)


@triton.jit
def rows_of_keys(pairs, BY_KEY: tl.constexpr):
    """A tile of pairs as [keys, queries]."""
    if BY_KEY:
        return pairs
    else:
        return tl.trans(pairs)


@triton.jit
def rows_of_queries(pairs, BY_KEY: tl.constexpr):
    """A tile of pairs as [queries, keys]."""
    if BY_KEY:
        return tl.trans(pairs)
    else:
        return pairs


@triton.jit
def load_rows(ptr, rows, first, end, stride, other, EVEN: tl.constexpr):
    """One fp32 value per row; `other` outside first .. end-1, where nothing is read."""
    if EVEN:
        return tl.load(ptr + rows * stride)
    else:
        return tl.load(ptr + rows * stride, mask=(rows >= first) & (rows < end), other=other)


@triton.jit
def visible(
    q_rows, q_ids, kv_rows, kv_ids, valid, shown, kv_len, lo, hi,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_SEGMENTS: tl.constexpr,
    HAS_DENSE: tl.constexpr,
):  # fmt: skip
    """Whether the mask lets the (query, key) pairs of a tile through.

    `q_rows` and their `q_ids` broadcast against `kv_rows`, their `kv_ids` (both ids by `load_ids`) and `valid`, which
    says of each key whether it is valid (`load_keys`); `shown` says it of each pair (`load_shown`).
    """
    keep = (kv_rows < kv_len) & (q_rows >= 0)
    if HAS_LO:
        keep = keep & (q_rows - kv_rows >= lo)
    if HAS_HI:
        keep = keep & (q_rows - kv_rows <= hi)
    if HAS_KEYS:
        keep = keep & valid
    if HAS_SEGMENTS:
        keep = keep & (q_ids == kv_ids)
    if HAS_DENSE:
        keep = keep & shown
    return keep
