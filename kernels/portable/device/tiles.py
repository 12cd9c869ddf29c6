"""Building blocks of the portable kernels: tile loads, the mask inside a tile, softmax probabilities.

Only `triton.jit` functions live here: their text is pasted into Inductor's template (see `templates.py`).

Note [Log-sum-exp in two parts]
    A bias may be so large that a log-sum-exp in fp32 keeps nothing of the number of keys: all scores of a row may be
    `finfo.min`, which is a uniform softmax.  So the forward of a call with a bias writes two numbers per row, the
    largest score and the logarithm in base 2 of the sum of exp(score - largest), and the backward reads both.  LSE is
    then [batch, q heads, 2 * q_len]: all rows of the first number, then all of the second.

Note [Rows of a tile of pairs]
    In the dk/dv kernel P and dS are left operands of matmuls, with one row per key.  Without a bias they are computed
    in this form (BY_KEY, [keys, queries]), so that they stay in registers.  With a bias, tiles have one row per query,
    like the bias in memory (not BY_KEY, [queries, keys]): the bias is loaded ahead into shared memory without a
    transpose, and registers hold per-query values once per row.  P and dS are then rounded to the dtype of the
    operands, and transposed through shared memory.
"""

import triton
import triton.language as tl

from ...common.device.rows import tokens_of
from ...common.device.score import biased, in_base_2
from .groups import OfKeys, OfQueries, Operand, TileRows


@triton.jit
def head_start(operand, b, h):
    """Returns a pointer to the first element of head `h` of batch element `b`; operand: [batch, heads, ...]."""
    return operand.start + b.to(tl.int64) * operand.strides[0] + h.to(tl.int64) * operand.strides[1]


@triton.jit
def head_of(operand, b, h):
    """Returns head `h` of batch element `b`, an `Operand` without the first two dimensions."""
    return Operand(head_start(operand, b, h), operand.strides[2:])


@triton.jit
def columns_of(rows, BLOCK: tl.constexpr):
    """Returns the column indices 0 .. BLOCK - 1, in the dtype of `rows.numbers`, which can hold every offset."""
    return tl.arange(0, BLOCK).to(rows.numbers.dtype)


@triton.jit
def load_tile(matrix, rows, DIM: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Loads `rows` (`TileRows`) of a matrix with DIM columns as a tile [rows, BLOCK]; positions are the matrix's rows.

    Rows outside first .. end-1 are not read and become zeros (EVEN: there are none), and so do columns from DIM on.
    """
    cols = columns_of(rows, BLOCK)
    inside = (rows.numbers >= rows.first) & (rows.numbers < rows.end)
    ptrs = matrix.start + rows.numbers[:, None] * matrix.strides[0] + cols[None, :] * matrix.strides[1]
    if EVEN and DIM == BLOCK:
        return tl.load(ptrs)
    elif EVEN:
        return tl.load(ptrs, mask=cols[None, :] < DIM, other=0.0)
    elif DIM == BLOCK:
        return tl.load(ptrs, mask=inside[:, None], other=0.0)
    else:
        return tl.load(ptrs, mask=inside[:, None] & (cols[None, :] < DIM), other=0.0)


@triton.jit
def load_chosen(matrix, rows, chosen, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Loads the tokens of the `chosen` rows (bool [rows]) as a tile [rows, BLOCK]; other rows are zeros.

    DIM: the matrix's columns.  No token of a row that is not chosen is read.
    """
    cols = columns_of(rows, BLOCK)
    ptrs = matrix.start + rows.tokens[:, None] * matrix.strides[0] + cols[None, :] * matrix.strides[1]
    if DIM == BLOCK:
        return tl.load(ptrs, mask=chosen[:, None], other=0.0)
    else:
        return tl.load(ptrs, mask=chosen[:, None] & (cols[None, :] < DIM), other=0.0)


@triton.jit
def place_rows(data, numbers, length, MASK: tl.constexpr):
    """Returns (the index of each row's token, whether it has one), [rows] each.

    Without a varlen layout in `data` every row of the mask is a token.  numbers: the positions of the rows; length: the
    number of rows of the mask.
    """
    return tokens_of(
        data.varlen_layout.TOKEN_OFFSETS, data.varlen_layout.TOKEN_COUNTS, numbers, length, MASK.VARLEN_ROWS
    )


@triton.jit
def numbers_of(tile, BLOCK: tl.constexpr, BUILD: tl.constexpr):
    """Returns the positions of the queries or keys of a tile, [BLOCK] in the dtype of indices."""
    return tile * BLOCK + tl.arange(0, BLOCK).to(BUILD.INDEX)


@triton.jit
def rows_of(data, numbers, seen, length, MASK: tl.constexpr):
    """Returns the `TileRows` of the positions `numbers`.

    seen: (first, end), for queries as `dash_seen_rows` returns them, for keys as `dash_seen_keys`; length: how many
    queries or keys there are.
    """
    tokens, exists = place_rows(data, numbers, length, MASK)
    return TileRows(numbers, seen[0], seen[1], tokens, exists)


@triton.jit
def id_range(vectors, rows, MASK: tl.constexpr):
    """Returns (smallest, largest) segment id of a tile's rows that hold a token, for `in_range`.

    Only varlen layouts (MASK.VARLEN_ROWS) need it; without one the result is (0, 0).  If no row holds a token, it is
    the empty range (2**30, -1).  vectors: of `OfQueries` or `OfKeys`, whose only relation is the equality of segment
    ids.
    """
    if MASK.VARLEN_ROWS:
        ids = vectors[0][0]
        return tl.min(tl.where(rows.exists, ids, 2**30), 0), tl.max(tl.where(rows.exists, ids, -1), 0)
    else:
        return 0, 0


@triton.jit
def in_range(chosen, vectors, others, MASK: tl.constexpr):
    """Returns `chosen`, bool [rows], restricted to rows whose segment id may occur in the other tile of a pair.

    others: the `id_range` of the other tile.  Without a varlen layout (MASK.VARLEN_ROWS is 0) nothing is restricted.  A
    tile has rows of one document alone, so that nothing of another document is read, whatever tiles the schedule
    visits.
    """
    if MASK.VARLEN_ROWS:
        return chosen & (vectors[0][0] >= others[0]) & (vectors[0][0] <= others[1])
    else:
        return chosen


@triton.jit
def keys_in_range(of_keys, queries, MASK: tl.constexpr):
    """Returns `of_keys` (`OfKeys`) with only those keys valid whose segment id may occur in a q tile, see `in_range`.

    queries: the `id_range` of the q tile.
    """
    return OfKeys(in_range(of_keys.valid, of_keys.vectors, queries, MASK), of_keys.vectors)


@triton.jit
def load_queries(matrix, queries, DIM: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, MASK: tl.constexpr):
    """Loads a tile of Q, dO or the output, [rows, BLOCK], for the rows of `queries`.

    With a varlen layout (MASK.VARLEN_ROWS) rows without a token are zeros; without one `load_tile` loads the tile, with
    zeros outside of the matrix's rows.
    """
    if MASK.VARLEN_ROWS:
        return load_chosen(matrix, queries, queries.exists, DIM, BLOCK)
    else:
        return load_tile(matrix, queries, DIM, BLOCK, EVEN)


@triton.jit
def load_q(head, queries, TILE: tl.constexpr, MASK: tl.constexpr):
    """Loads a tile of Q of one head, [BLOCK_Q, BLOCK_D]; see `load_queries` for rows of zeros."""
    return load_queries(head, queries, TILE.HEAD_DIM, TILE.BLOCK_D, TILE.EVEN_Q, MASK)


@triton.jit
def load_do(head, queries, TILE: tl.constexpr, MASK: tl.constexpr):
    """Loads a tile of dO or the output of one head, [BLOCK_Q, BLOCK_DV]; see `load_queries` for rows of zeros."""
    return load_queries(head, queries, TILE.VALUE_DIM, TILE.BLOCK_DV, TILE.EVEN_Q, MASK)


@triton.jit
def load_valid(matrix, keys, of_keys, DIM: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, MASK: tl.constexpr):
    """Loads a tile of K or V, [rows, BLOCK], with zeros for keys that are not valid.

    With a key validity vector or a varlen layout only the valid keys (`of_keys.valid`) are read; without either all
    keys are valid, and they are read as by `load_tile`.
    """
    if MASK.HAS_KEYS or MASK.VARLEN_ROWS > 0:
        return load_chosen(matrix, keys, of_keys.valid, DIM, BLOCK)
    else:
        return load_tile(matrix, keys, DIM, BLOCK, EVEN)


@triton.jit
def load_k(head, keys, of_keys, TILE: tl.constexpr, MASK: tl.constexpr):
    """Loads a tile of a head of K, [BLOCK_KV, BLOCK_D], with zeros where `load_valid` has them."""
    return load_valid(head, keys, of_keys, TILE.HEAD_DIM, TILE.BLOCK_D, TILE.EVEN_KV, MASK)


@triton.jit
def load_v(head, keys, of_keys, TILE: tl.constexpr, MASK: tl.constexpr):
    """Loads a tile of a head of V, [BLOCK_KV, BLOCK_DV], with zeros where `load_valid` has them."""
    return load_valid(head, keys, of_keys, TILE.VALUE_DIM, TILE.BLOCK_DV, TILE.EVEN_KV, MASK)


@triton.jit
def load_keys(operand, b, h, keys, MASK: tl.constexpr):
    """Returns whether the `keys` of kv head `h` are valid, bool [BLOCK_KV]; all are if there is no key validity vector.

    operand: that vector, int32 [batch, kv heads, kv_len]; keys outside first .. end-1 are not read and not valid.
    """
    if MASK.HAS_KEYS:
        ptrs = head_start(operand, b, h) + keys.numbers * operand.strides[2]
        return tl.load(ptrs, mask=(keys.numbers >= keys.first) & (keys.numbers < keys.end), other=0) != 0
    else:
        return keys.numbers >= 0


@triton.jit
def load_integers(operand, b, rows):
    """Loads one integer for each of the queries or keys `rows` of batch element `b`, from `operand` [batch, length].

    Positions outside first .. end-1 are not read.  Numbers of int32 stay as they are, all others become int64, so that
    numbers of any two types are compared by their values.
    """
    ptrs = operand.start + b.to(tl.int64) * operand.strides[0] + rows.numbers * operand.strides[1]
    numbers = tl.load(ptrs, mask=(rows.numbers >= rows.first) & (rows.numbers < rows.end), other=0)
    if numbers.dtype == tl.int32:
        return numbers
    else:
        return numbers.to(tl.int64)


@triton.jit
def load_vectors(operands, b, rows):
    """Loads, for each relation of the mask, a tuple of its integer vectors [rows] for the queries or keys `rows`.

    operands: for each relation a tuple of operands [batch, length]; b: the batch element.
    """
    found = ()
    for i in tl.static_range(len(operands)):
        of_relation = ()
        for j in tl.static_range(len(operands[i])):
            of_relation = of_relation + (load_integers(operands[i][j], b, rows),)
        found = found + (of_relation,)
    return found


@triton.jit
def load_of_keys(data, b, h, keys, MASK: tl.constexpr):
    """Loads the `OfKeys` of the keys of a tile: which are valid, and the mask's vectors for them.

    In a varlen layout (VARLEN_ROWS) the keys that hold a token are valid.
    """
    valid = keys.exists if MASK.VARLEN_ROWS else load_keys(data.keys, b, h, keys, MASK)
    return OfKeys(valid, load_vectors(data.of_keys, b, keys))


@triton.jit
def load_of_queries(data, b, queries):
    """Loads the mask's vectors for the queries of a tile, as an `OfQueries`.

    data: a `Data`.  b: the batch element.  queries: the tile's rows.
    """
    return OfQueries(load_vectors(data.of_queries, b, queries))


@triton.jit
def load_pairs(operand, b, hq, queries, keys, BY_KEY: tl.constexpr):
    """Loads the elements of `operand`, [batch, q heads, q_len, kv_len], for the (query, key) pairs of a tile.

    The shape is [BLOCK_KV, BLOCK_Q] if BY_KEY, else [BLOCK_Q, BLOCK_KV].  Pairs past the ends of queries or keys are
    not read and become zeros.
    """
    q_rows, kv_rows = by_query(queries.numbers, BY_KEY), by_key(keys.numbers, BY_KEY)
    ptrs = head_start(operand, b, hq) + q_rows * operand.strides[2] + kv_rows * operand.strides[3]
    return tl.load(ptrs, mask=(q_rows < queries.end) & (kv_rows < keys.end), other=0)


@triton.jit
def load_shown(data, b, hq, queries, keys, BY_KEY: tl.constexpr):
    """Returns which pairs of a tile the elementwise masks show, as bools; all true without an elementwise mask.

    The shape is [BLOCK_KV, BLOCK_Q] if BY_KEY, else [BLOCK_Q, BLOCK_KV]; without an elementwise mask, the size along
    the queries is 1.
    """
    shown = by_key(keys.numbers, BY_KEY) >= 0
    for i in tl.static_range(len(data.of_pairs)):
        pairs = load_pairs(data.of_pairs[i], b, hq, queries, keys, BY_KEY) != 0
        shown = pairs if i == 0 else shown & pairs
    return shown


@triton.jit
def load_bias(data, b, hq, queries, keys, tile_schedule, BY_KEY: tl.constexpr, SCORE: tl.constexpr):
    """Returns what is added to the scores of a tile, fp32: a bias, the term of ALiBi slopes, or the sum of both.

    It is the scalar zero if nothing is added; else its shape is that of `load_pairs`.
    """
    if len(data.added.slopes) > 0:
        slope = tl.load(head_start(data.added.slopes, b, hq))
        q_len, kv_len, _lo, _hi = tile_schedule
        last = queries.numbers + tl.cast(kv_len - q_len, queries.numbers.dtype)
        distance = tl.abs(by_query(last, BY_KEY) - by_key(keys.numbers, BY_KEY)).to(tl.float32)
        of_slope = -slope * distance
        if len(data.added.bias) > 0:
            return load_pairs(data.added.bias, b, hq, queries, keys, BY_KEY).to(tl.float32) + of_slope
        else:
            return of_slope
    elif len(data.added.bias) > 0:
        return load_pairs(data.added.bias, b, hq, queries, keys, BY_KEY).to(tl.float32)
    else:
        return 0.0


@triton.jit
def prefetch_bias(
    data, b, hq, q_tile, kv, wanted, tile_schedule, TILE: tl.constexpr, SCORE: tl.constexpr, BUILD: tl.constexpr
):  # fmt: skip
    """Requests that the bias of tile pair (q_tile, kv) be brought into the L2 cache, if `wanted`; it does not wait.

    The loads of a pipelined loop are early enough for data in the L2 cache. A bias comes from device memory, in few
    bytes of each of many rows, and takes longer than one or two iterations.
    """
    if len(data.added.bias) > 0 and wanted:
        q_len, kv_len, _lo, _hi = tile_schedule
        ptr, strides = data.added.bias
        # 64 bytes for each request, and the tile's columns at least once
        EVERY: tl.constexpr = min(512 // ptr.dtype.element_ty.primitive_bitwidth, TILE.BLOCK_KV)
        rows = tl.minimum(numbers_of(q_tile, TILE.BLOCK_Q, BUILD), q_len - 1)
        columns = tl.arange(0, TILE.BLOCK_KV // EVERY).to(BUILD.INDEX) * EVERY
        keys = tl.minimum(kv * TILE.BLOCK_KV + columns, kv_len - 1)
        pointers = head_start(data.added.bias, b, hq) + rows[:, None] * strides[2] + keys[None, :] * strides[3]
        prefetch(pointers, BUILD.INTERPRET)


@triton.jit
def prefetch(pointers, INTERPRET: tl.constexpr):
    """Requests that the cache lines at these addresses be brought into the L2 cache; all must be readable.

    In a pipelined loop, the call must stand in a branch: the compiler can make a branch conditional, but not the call
    itself.
    """
    if not INTERPRET:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def load_sums(lse, queries, q_len, TILE: tl.constexpr, SCORE: tl.constexpr):
    """Returns the two numbers per row, [BLOCK_Q] each, that `probabilities` takes as lse and excess.

    With a bias they are the parts of Note [Log-sum-exp in two parts]; without one the first is the log-sum-exp in base
    2.

    lse: the log-sum-exps of a head, an `Operand`.  Rows outside first .. end-1 are not read, and their probabilities
    become zero; with a bias, so do those of rows that see no key.
    """
    sums = load_rows(lse, queries, float("inf"), TILE.EVEN_Q)
    if SCORE.HAS_BIAS:
        sums = tl.where(sums == float("-inf"), float("inf"), sums)
        second = Operand(lse.start + tl.cast(q_len, queries.numbers.dtype) * lse.strides[0], lse.strides)
        return sums, load_rows(second, queries, 0.0, TILE.EVEN_Q)
    else:
        return sums * 1.4426950408889634, sums


@triton.jit
def load_delta(saved, row, queries, q_len, TILE: tl.constexpr):
    """Loads the saved deltas (see `delta.delta_tile`) of a tile of queries of one head, fp32 [BLOCK_Q].

    queries: the tile's rows; those outside `queries.first` .. `queries.end - 1` are not read and get zeros.  row: the
    index of the head in [batch, q heads], flattened.
    """
    return load_rows(Operand(saved.DELTA + row * q_len, (1,)), queries, 0.0, TILE.EVEN_Q)


@triton.jit
def probabilities(s, bias, lse, excess, SCORE: tl.constexpr):
    """Returns the softmax probabilities of a tile of products `s`; lse, excess: as `load_sums` returns them."""
    log2e = 1.4426950408889634
    if SCORE.HAS_BIAS:
        return tl.math.exp2(tl.math.fma(biased(s, bias, SCORE) - lse, log2e, -excess))
    else:
        return tl.math.exp2(in_base_2(s, SCORE) - lse)


@triton.jit
def row_sums(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns the row sums of a tile [ROWS, COLUMNS], added in the same order for any register layout.

    Two numbers are added at a time: first the numbers that a thread has of a matmul's result, then four threads' sums.
    """
    sums = tl.sum(tl.reshape(tile, [ROWS, COLUMNS // 8, 4, 2]), 3)
    for i in tl.static_range((COLUMNS // 8).bit_length() - 1):
        sums = tl.sum(tl.reshape(sums, [ROWS, COLUMNS >> (4 + i), 2, 4]), 2)
    return tl.sum(tl.sum(tl.reshape(sums, [ROWS, 2, 2]), 2), 1)


@triton.jit
def by_query(x, BY_KEY: tl.constexpr):
    """Expands a vector with one entry for each query so that it broadcasts to a tile of pairs.

    The tile is [keys, queries] if BY_KEY, else [queries, keys]; see Note [Rows of a tile of pairs].
    """
    if BY_KEY:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def by_key(x, BY_KEY: tl.constexpr):
    """Expands a vector with one entry for each key so that it broadcasts to a tile of pairs.

    The tile is [keys, queries] if BY_KEY, else [queries, keys]; see Note [Rows of a tile of pairs].
    """
    if BY_KEY:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit
def pair_products(of_queries, of_keys, BY_KEY: tl.constexpr, PRECISION: tl.constexpr):
    """Returns the products of all queries [queries, columns] with all keys [keys, columns] of two tiles.

    The result is [keys, queries] if BY_KEY, else [queries, keys].
    """
    if BY_KEY:
        return tl.dot(of_keys, tl.trans(of_queries), input_precision=PRECISION)
    else:
        return tl.dot(of_queries, tl.trans(of_keys), input_precision=PRECISION)


@triton.jit
def rows_of_keys(pairs, BY_KEY: tl.constexpr):
    """Returns a tile of pairs, which is [keys, queries] if BY_KEY, else [queries, keys], as [keys, queries]."""
    if BY_KEY:
        return pairs
    else:
        return tl.trans(pairs)


@triton.jit
def rows_of_queries(pairs, BY_KEY: tl.constexpr):
    """Returns a tile of pairs, which is [keys, queries] if BY_KEY, else [queries, keys], as [queries, keys]."""
    if BY_KEY:
        return tl.trans(pairs)
    else:
        return pairs


@triton.jit
def load_rows(vector, rows, other, EVEN: tl.constexpr):
    """Loads one fp32 value per row from `vector`, an `Operand` with the values of one head.

    Rows outside rows.first .. rows.end-1 are not read and get `other`.  EVEN: there are none.
    """
    numbers = rows.numbers
    if EVEN:
        return tl.load(vector.start + numbers * vector.strides[0])
    else:
        inside = (numbers >= rows.first) & (numbers < rows.end)
        return tl.load(vector.start + numbers * vector.strides[0], mask=inside, other=other)


@triton.jit
def visible(
    data, b, hq, queries, keys, of_queries, of_keys, tile_schedule,
    ASKS_KEYS: tl.constexpr, BY_KEY: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Returns whether each (query, key) pair of a tile is visible under the mask: bool.

    The shape is [BLOCK_KV, BLOCK_Q] if BY_KEY, else [BLOCK_Q, BLOCK_KV]. ASKS_KEYS: key validity is tested as well.
    """
    _q_len, kv_len, lo, hi = tile_schedule
    q_rows, kv_rows = by_query(queries.numbers, BY_KEY), by_key(keys.numbers, BY_KEY)
    shown = load_shown(data, b, hq, queries, keys, BY_KEY)
    valid = by_key(of_keys.valid, BY_KEY)
    keep = (kv_rows < kv_len) & (q_rows >= 0)
    if MASK.HAS_LO:
        keep = keep & (q_rows - kv_rows >= lo)
    if MASK.HAS_HI:
        keep = keep & (q_rows - kv_rows <= hi)
    if ASKS_KEYS:
        keep = keep & valid
    for i in tl.static_range(len(MASK.RELATIONS)):
        of_query, of_key = (), ()
        for j in tl.static_range(len(of_queries.vectors[i])):
            of_query = of_query + (by_query(of_queries.vectors[i][j], BY_KEY),)
        for j in tl.static_range(len(of_keys.vectors[i])):
            of_key = of_key + (by_key(of_keys.vectors[i][j], BY_KEY),)
        keep = MASK.RELATIONS[i](keep, of_query, of_key)
    if len(data.of_pairs) > 0:
        keep = keep & shown
    return keep
