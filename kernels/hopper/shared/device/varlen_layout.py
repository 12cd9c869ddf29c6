"""Varlen layouts on the device: the tokens of padded rows (`VarlenLayout`), and how results are stored."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....common.device.aggregates import aggregate, group
from .operations import here, store_rows


@aggregate
class VarlenLayout:
    """Maps the padded rows of a packed mask to tokens, see `model.VarlenLayout`.

    arguments: the group `arguments.VARLEN_LAYOUT`, pointers to int32 [row blocks]; rows: the number of padded rows;
    VARLEN_ROWS: rows of a row block, or 0 if there is no varlen layout (every row is a token), and nothing is read.
    """

    arguments: group
    rows: gl.tensor
    VARLEN_ROWS: gl.constexpr

    @gluon.jit
    def token(self, row):
        """Returns the index of the token of `row`, the first row of a row block; an index past all tokens if `row` is
        out of bounds.
        """
        exists = (row >= 0) & (row < self.rows)
        return gl.load(self.arguments.token_offset_ptr + row // self.VARLEN_ROWS, mask=exists, other=self.rows)

    @gluon.jit
    def count(self, row, ROWS: gl.constexpr):
        """Returns how many of ROWS rows, from `row` on, have a token; these rows come first.

        ROWS: a multiple of VARLEN_ROWS.
        """
        count = 0
        for i in gl.static_range(ROWS // self.VARLEN_ROWS):
            first = row + i * self.VARLEN_ROWS
            exists = (first >= 0) & (first < self.rows)
            count += gl.load(self.arguments.token_count_ptr + first // self.VARLEN_ROWS, mask=exists, other=0)
        return count


@gluon.jit
def store_tile(varlen_layout, target, desc, b, h, row, tile, WARPS: gl.constexpr, COLUMN: gl.constexpr = 0):
    """Starts to store `tile`, [rows, columns] in shared memory, to rows from `row` on and columns from COLUMN on.

    TMA stores whole tiles, and drops what lies outside the tensor.  In a varlen layout the tokens of a tile may be
    followed by those of the next document.  So a tile with rows that have no token is stored by threads, up to its last
    token; they have read `tile` when they next meet at a barrier.

    target: the group `arguments.target`, None without varlen layout; WARPS: the number of warps of the calling role.
    """
    if varlen_layout.VARLEN_ROWS:
        row = here(row)
        h = here(h)
        token = varlen_layout.token(row)
        store_tokens(target, desc, b, h, token, varlen_layout.count(row, tile.shape[0]), tile, WARPS, COLUMN)
    else:
        store_rows(desc, b, h, row, tile, COLUMN)


@gluon.jit
def store_tokens(target, desc, b, h, token, count, tile, WARPS: gl.constexpr, COLUMN: gl.constexpr = 0):
    """Starts to store the first `count` rows of `tile`, or all if it has no more, to the tokens from `token` on.

    The other arguments are those of `store_tile`, with a varlen layout.
    """
    if count >= tile.shape[0]:
        store_rows(desc, b, h, token, tile, COLUMN)
    else:
        _store_first(target, b, h, token, count, tile, WARPS, COLUMN)


@gluon.jit
def _store_first(target, b, h, token, count, tile, WARPS: gl.constexpr, COLUMN: gl.constexpr):
    """Store the first `count` rows of `tile` to the tokens from `token` on, 32 rows at a time."""
    ROWS: gl.constexpr = tile.shape[0]
    PIECE: gl.constexpr = min(32, ROWS)
    WIDTH: gl.constexpr = tile.shape[1]
    LANES: gl.constexpr = min(WIDTH // 8, 32)  # of a row
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    rows = gl.arange(0, PIECE, gl.SliceLayout(1, layout))
    columns = gl.expand_dims(COLUMN + gl.arange(0, WIDTH, gl.SliceLayout(0, layout)), 0)
    head = target.ptr + b.to(gl.int64) * target.batch_stride + h.to(gl.int64) * target.head_stride
    for i in gl.static_range(ROWS // PIECE):
        local = gl.expand_dims(i * PIECE + rows, 1)
        pointers = head + (token + local).to(gl.int64) * target.row_stride + columns
        inside = (local < count) & (columns < target.dim)
        gl.store(pointers, tile.slice(i * PIECE, PIECE).load(layout), mask=inside)
