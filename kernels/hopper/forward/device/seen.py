"""Dense masks as bits, one per score of a kv tile, in memory in the order in which threads hold the scores.

Note [Seen bits] in schedule/table_tile_schedule.py says which bit belongs to which score.  The bits contain the whole
mask: band, segment ids, and the ends of queries and keys.  A thread has the bits of its scores in one word or two,
which it loads before it waits for the scores.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .....schedule.table_tile_schedule import seen_words
from ...shared.device.seen_bits import keep_set, spread
from .tile_work import ROWS

words_of = gluon.constexpr_function(seen_words)


@gluon.jit
def ask(work, data, b, head, block, kv, wanted):
    """Loads a dense mask's bits of a row block and a kv tile: int32 [ROWS / 2, 4, words], zeros where `wanted` is
    false.

    The order of the words is that of Note [Seen bits] in schedule/table_tile_schedule.py.  A row block that does not
    exist gets zeros, so that its queries see no key.
    """
    WORDS: gl.constexpr = words_of(work.BLOCK_KV)
    layout: gl.constexpr = _words_layout(WORDS)
    row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    column: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    word: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, layout))
    threads = gl.expand_dims(gl.arange(0, ROWS // 2, row) * 4, 1) + gl.expand_dims(gl.arange(0, 4, column), 0)
    offsets = gl.expand_dims(threads * WORDS, 2) + gl.expand_dims(gl.expand_dims(gl.arange(0, WORDS, word), 0), 1)
    exists = (block >= 0) & (block < work.row_blocks()) & wanted
    kv_tiles = (work.kv_len + work.BLOCK_KV - 1) // work.BLOCK_KV
    table = data.table(b, head).to(gl.int64)
    tile = (table * work.row_blocks() + block) * kv_tiles + kv
    return gl.load(data.arguments.seen_bits_ptr + tile * (2 * ROWS * WORDS) + offsets, mask=exists, other=0)


@gluon.jit
def hide(s, words):
    """Returns the scores `s` with -inf where their bit in `words`, as `ask` returns them, is zero."""
    WORDS: gl.constexpr = words.shape[2]
    COUNT: gl.constexpr = s.shape[1] // WORDS // 2  # bits of a word
    words, bits = spread(words, 0, COUNT)
    return keep_set(s, _as_scores(words, s, WORDS), _as_scores(bits, s, WORDS), "FF800000")  # -inf


@gluon.jit
def _as_scores(parts, s, WORDS: gl.constexpr):
    """Returns the element of `parts`, [.., words, 2, 2, ...], that belongs to each score: [ROWS, BLOCK_KV]."""
    ROWS: gl.constexpr = s.shape[0]
    BLOCK_KV: gl.constexpr = s.shape[1]
    parts = parts.reshape([ROWS // 16, 8, 4, WORDS, BLOCK_KV // WORDS // 8, 2, 2])
    parts = parts.permute([0, 5, 1, 3, 4, 2, 6]).reshape([ROWS, BLOCK_KV])
    return gl.convert_layout(parts, s.type.layout, assert_trivial=True)


@gluon.constexpr_function
def _words_layout(words):
    """Returns the layout of mask bits, [ROWS / 2, 4, words].

    Thread ``4 r + l`` of a warp has row r of the warp's 8, column l, and all words.
    """
    registers = [[0, 0, 1 << i] for i in range(words.bit_length() - 1)]
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[8, 0, 0], [16, 0, 0]], [], [ROWS // 2, 4, words])
