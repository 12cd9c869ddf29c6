"""The argument groups of the portable kernels: named tuples of operands and constants, one for each concern.

Note [Argument groups]
    Functions on the device take named tuples.  Their text is pasted into Inductor's template like that of the functions
    (see `templates.py`), and a template's body makes the groups.

    Run-time values: `Inputs`, `Saved`, `Data`, `TileRows`, `OfQueries`, `OfKeys`, `Accumulator` and `Sums`, and in
    the tuple `tile_schedule` = (q_len, kv_len, lo, hi), see `schedule_functions`.  Assigning a group in a kernel
    turns all of its members into tensors.  So compile-time values have groups of their own, `Tile`, `Mask`,
    `score.Score` and `Build`, whose names are in capitals and which are assigned as `tl.constexpr`.

    Kernels know the relations of a mask (`model.relations`), not its components:  `Data`, `OfQueries` and `OfKeys` have
    a tuple for each relation, in the order of `Mask.RELATIONS`, and loops go over them.  A new feature that changes
    scores adds a member to `Score`; no signature changes.

Note [Data operands]
    `Data` is what masks and scores read.  A kernel reads a member only if it has the flag that stands after the
    member's name below; otherwise the member may be anything of the same form.  Tuples are empty where there is
    nothing.  Operands have strides for each dimension.

    keys (HAS_KEYS): int32 [batch, kv heads, kv_len]; no row sees a key whose entry is zero.

    of_queries, of_keys: for each relation of `Mask.RELATIONS` a tuple of int32 or int64 [batch, q_len], and one of
    [batch, kv_len], in the order of its roles; a row sees only keys that the relation shows.

    None of these has elements of less than 32 bits.  From the narrowest load on which an operand of a matmul depends,
    even through a mask, Triton derives which elements along k an instruction of sm_80 multiplies (`kWidth`), and so the
    order of the sum.  A vector of bools would therefore give other bits than no vector.

    of_pairs: a tuple of bool or uint8 [batch, q heads, q_len, kv_len]; a row sees only keys whose entries are not zero.

    added (HAS_BIAS): what is added to the scaled scores, a group `Added` with a member for each operand of
    `model.operands` that is added; a member is an empty tuple without the operand.

    added.bias: floats [batch, q heads, q_len, kv_len].  Any values: a score of -inf has the probability zero.  A row
    all of whose scores are -inf counts as one that sees no key, but a key that only a bias of -inf hides is read.

    added.slopes: fp32 [batch, q heads]; -slope * |i + kv_len - q_len - j| is added to the score of query i and key j.

    varlen_layout (VARLEN_ROWS): which tokens the padded rows of a packed mask hold.  Lengths count rows, and so do ids,
    log-sum-exps and deltas; all other tensors have tokens, which `tokens_of` finds.  A row without a token is not read
    and not written.

    drop (ROUNDS): dropout, see `dropout`.
"""

from typing import NamedTuple


class Operand(NamedTuple):
    """A tensor of any strides, or a head of one.

    start: pointer to the first element; strides: of all dimensions, in elements.
    """

    start: object
    strides: object


class Inputs(NamedTuple):
    """The inputs of attention, an `Operand` each.

    q: [batch, q heads, q_len, HEAD_DIM]; k: [batch, kv heads, kv_len, HEAD_DIM]; v: [.., kv_len, VALUE_DIM].
    """

    q: object
    k: object
    v: object


class Saved(NamedTuple):
    """What a backward reads in addition to q, k and v.

    do: [batch, q heads, q_len, VALUE_DIM]; lse: natural log, fp32 [batch, q heads, >= q_len], see Note [Log-sum-exp in
    two parts]; DELTA: pointer to fp32 [batch, q heads, q_len], contiguous; heads: kv heads of a batch element.
    """

    do: object
    lse: object
    DELTA: object
    heads: object


class Made(NamedTuple):
    """The operands, besides dO, from which delta is computed; each is an `Operand`.

    out: the forward's output, [batch, q heads, q_len, VALUE_DIM]; grad_lse: the gradient of the log-sum-exp, fp32
    [batch, q heads, q_len or tokens], read only if the call has one.
    """

    out: object
    grad_lse: object


class VarlenLayout(NamedTuple):
    """The varlen layout of packed tokens, see `model.VarlenLayout`.

    TOKEN_OFFSETS, TOKEN_COUNTS: pointers to int32 [row blocks], the first token and the number of tokens of each row
    block, see `tokens_of`; tokens: the number of tokens.
    """

    TOKEN_OFFSETS: object
    TOKEN_COUNTS: object
    tokens: object


class Dropout(NamedTuple):
    """The dropout of a call.

    seed: int64, of the random numbers; threshold: 65536 times the fraction of probabilities that are dropped; rescale:
    the factor of those that are kept.
    """

    seed: object
    threshold: object
    rescale: object


class Data(NamedTuple):
    """The operands of masks, of what is added to scores, and of dropout; see Note [Data operands]."""

    keys: object
    of_queries: object
    of_keys: object
    of_pairs: object
    added: object
    varlen_layout: object
    drop: object


class TileRows(NamedTuple):
    """The queries or the keys of a tile, BLOCK of them.

    numbers: their positions, [BLOCK] in the dtype of indices.  first, end: scalars; only positions first .. end-1 are
    loaded.  The others are past the length, or the band hides all of their pairs.  tokens, exists: [BLOCK] each, the
    token in memory of each position, and whether there is one, see `tokens_of`.
    """

    numbers: object
    first: object
    end: object
    tokens: object
    exists: object


class OfQueries(NamedTuple):
    """The mask's vectors for the queries of a tile.

    vectors: for each relation of the mask a tuple of int32 or int64 [BLOCK_Q].
    """

    vectors: object


class OfKeys(NamedTuple):
    """The mask's vectors for the keys of a tile.

    valid: bool [BLOCK_KV], all true without a key validity vector; vectors: for each relation a tuple of int32 or int64
    [BLOCK_KV].
    """

    valid: object
    vectors: object


class Accumulator(NamedTuple):
    """Where dq is accumulated in order, see Note [Ordered accumulation]; only used when ORDERED.

    Both are zeroed before.  DQ: pointer to fp32 [batch, q heads, q_len or tokens, HEAD_DIM], unscaled; SEM: semaphores,
    pointer to int32 [batch, q heads, q tiles].
    """

    DQ: object
    SEM: object


class Sums(NamedTuple):
    """Where the gradient of one [q_len, kv_len] plane of a bias is summed; see Note [Sums of a bias's gradient].

    SUMS: pointer to fp32 [q tiles, kv tiles, BLOCK_Q * BLOCK_KV], not used where there is a single addend; begins,
    ends: whether this is the first addend of the plane, and the last; gradient: an `Operand` [q_len, kv_len], the
    result.
    """

    SUMS: object
    begins: object
    ends: object
    gradient: object


class Tile(NamedTuple):
    """The sizes of tiles and heads, and whether tiles divide the lengths.

    BLOCK_D, BLOCK_DV: powers of two, at least HEAD_DIM, VALUE_DIM; GROUP: query heads of a kv head; EVEN_Q, EVEN_KV:
    every query (or key) of every tile lies within the length, and the band shows at least one of its pairs.
    """

    BLOCK_Q: int
    BLOCK_KV: int
    HEAD_DIM: int
    BLOCK_D: int
    VALUE_DIM: int
    BLOCK_DV: int
    GROUP: int
    EVEN_Q: bool
    EVEN_KV: bool


class Mask(NamedTuple):
    """The compile-time properties of a mask.

    HAS_LO, HAS_HI: the band has a lower, an upper bound.  HAS_KEYS: there is a key validity vector.  RELATIONS: the
    tests of the relations of queries and keys, see `model.relations`.  BY_PAIR: there is such a relation, or an
    elementwise mask.  VARLEN_ROWS: the rows of a row block in a varlen layout, whose only relation is the equality of
    document ids; 0 if every row is a token.
    """

    HAS_LO: bool
    HAS_HI: bool
    HAS_KEYS: bool
    BY_PAIR: bool
    RELATIONS: object
    VARLEN_ROWS: int


class Build(NamedTuple):
    """How a kernel is compiled.

    PRECISION: `input_precision` of fp32 matmuls; STAGES: of pipelined loops; INDEX: the dtype of indices; INTERPRET:
    the kernel is for Triton's interpreter.
    """

    PRECISION: str
    STAGES: int
    INDEX: object
    INTERPRET: bool
