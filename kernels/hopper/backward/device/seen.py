"""Dense masks as bits, one per score of a partial tile pair, in memory in the order in which threads hold the scores.

Note [Seen bits] in schedule/table_tile_schedule.py says which bit belongs to which score.  The bits contain the whole
mask: band, segment ids, and the ends of queries and keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...shared.device.seen_bits import keep_set, spread


@gluon.jit
def ask_seen(seen_bits, pair, wanted, SCORES: gl.constexpr, PIECE: gl.constexpr, LAYOUT: gl.constexpr):
    """Loads the words of bits of a piece of a tile pair's q tile: int32 [threads], zeros where `wanted` is false.

    seen_bits: int32 [tile pairs, words, threads]; pair: the index of the tile pair; SCORES: the number of its scores;
    PIECE: the index of the piece; LAYOUT: that of a piece's scores, [keys, queries].
    """
    THREADS: gl.constexpr = threads_of(LAYOUT)
    WORDS: gl.constexpr = max(1, SCORES // THREADS // 32)
    WORD: gl.constexpr = min(PIECE, WORDS - 1)
    places = gl.arange(0, THREADS, _one_for_each_thread(THREADS)) + WORD * THREADS
    return gl.load(seen_bits + pair.to(gl.int64) * (WORDS * THREADS) + places, mask=wanted, other=0)


@gluon.jit
def keep_seen(p, words, PIECE: gl.constexpr):
    """Returns the probabilities `p`, [keys, queries], with zeros where their bit in `words`, [threads], is zero.

    PIECE: the index of the piece of the q tile; pieces with fewer than 32 bits for a thread share a word.
    """
    THREADS: gl.constexpr = words.shape[0]
    BLOCK_KV: gl.constexpr = p.shape[0]
    COUNT: gl.constexpr = BLOCK_KV * p.shape[1] // THREADS
    ALONG_ROWS: gl.constexpr = BLOCK_KV // 16
    ALONG_COLUMNS: gl.constexpr = THREADS // 32 // ALONG_ROWS
    words, bits = spread(words, PIECE * COUNT % 32, COUNT)
    return keep_set(p, _as_scores(words, p, ALONG_COLUMNS), _as_scores(bits, p, ALONG_COLUMNS), "00000000")


@gluon.jit
def _as_scores(parts, p, ALONG_COLUMNS: gl.constexpr):
    """Returns the element of `parts`, [threads, 2, 2, ...], that belongs to each probability: [keys, queries]."""
    ROWS: gl.constexpr = p.shape[0]
    COLUMNS: gl.constexpr = p.shape[1]
    parts = parts.reshape([ALONG_COLUMNS, ROWS // 16, 8, 4, COLUMNS // ALONG_COLUMNS // 8, 2, 2])
    parts = parts.permute([1, 5, 2, 0, 4, 3, 6]).reshape([ROWS, COLUMNS])
    return gl.convert_layout(parts, p.type.layout, assert_trivial=True)


@gluon.constexpr_function
def threads_of(layout):
    """Returns the number of threads of the scores' layout."""
    along_rows, along_columns = layout.warps_per_cta
    return 32 * along_rows * along_columns


@gluon.constexpr_function
def _one_for_each_thread(threads):
    """Returns the layout of a vector that has one element for each thread, in their order."""
    lanes = [[1 << i] for i in range(5)]
    warps = [[32 << i] for i in range((threads // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout([], lanes, warps, [], [threads])
