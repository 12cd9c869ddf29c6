"""Packed documents in the forward: `Documents` lists the q tiles of all documents, each with the band of its own.

Note [Documents]
    No query of a document sees a key of another one, so each document is an attention by itself: a band over its own
    queries and keys, counted from its first token.  A q tile belongs to one document and needs only its place there
    and the document's length, first token and first padded row (`model.VarlenLayout`).  Its kv tiles follow from the
    band as they do without documents, and neither lists of kv tiles nor segment ids are read.

    Two things differ from an attention without documents.  The last row block and the last kv tile of a document may
    reach into the next one.  Such rows are computed but not stored, and scores of such keys are masked; their rows of V
    are cleared by the producer, because zero times NaN is NaN, see Note [Rows that take no part] in
    `shared.device.clear`.  And the tokens after the last document see no key: their entries in the list have a
    negative length, which stands for a band without any pair.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .....schedule import document_tiles
from ....common.device.aggregates import aggregate, group, replace

WORDS, NOWHERE = gl.constexpr(document_tiles.WORDS), gl.constexpr(document_tiles.NOWHERE)


@aggregate
class Documents:
    """The work list of the q tiles of packed documents, in the order in which they are computed for each head.

    arguments: the group `arguments.DOCUMENTS`, None without packed documents; GIVEN: whether there are arguments.  The
    list has WORDS int32 per entry: the number of q tiles in its first entry, then the entries of
    `schedule.document_tiles.QTile`.
    """

    arguments: group
    GIVEN: gl.constexpr

    @gluon.jit
    def q_tiles(self, work):
        """Returns the number of q tiles of a head, int32."""
        if self.GIVEN:
            return gl.load(self.arguments.q_tiles_ptr)
        else:
            return work.q_tiles()

    @gluon.jit
    def entry(self, q_tile):
        """Returns (first row block, first token, first row, signed length, batch element) of a q tile and its document,
        int32.

        The row block is counted from the document's first one, and may be negative; without documents all are zero.
        """
        if self.GIVEN:
            place = self.arguments.q_tiles_ptr + WORDS * (1 + q_tile)
            return gl.load(place), gl.load(place + 1), gl.load(place + 2), gl.load(place + 3), gl.load(place + 4)
        else:
            return 0, 0, 0, 0, 0

    @gluon.jit
    def within(self, work, length):
        """Returns the work of a document: the lengths and the band that hold for its queries and keys.

        work: a `TileWork`; length: as `entry` returns it.  Without documents `work` is returned.
        """
        if self.GIVEN:
            outside = length < 0
            tokens = gl.where(outside, -length, length)
            return replace(work, q_len=tokens, kv_len=tokens, lo=gl.where(outside, NOWHERE, work.lo))
        else:
            return work
