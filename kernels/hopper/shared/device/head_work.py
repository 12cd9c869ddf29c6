"""`HeadWork`: the query head that a CTA works on, and the sizes that all heads share."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....common.device.aggregates import aggregate, replace


@aggregate
class HeadWork:
    """The query head that a CTA works on, with the sizes, band and tile sizes that all heads share.

    ``lo <= q - kv <= hi`` is the band of the mask, anchored top left.  Every query head has its own tile schedules:
    `head` is its kv head, `member` its index in the group of GROUP query heads that share this kv head.  In the launch
    order all first members of groups come first, then all second ones, and so on, so that a member is launched after
    those before it.  n_q: q tiles of a head; SEEN_ROWS, SEEN_KEYS: generated functions of the schedule.
    """

    batch: gl.tensor
    head: gl.tensor
    member: gl.tensor
    q_heads: gl.tensor
    q_len: gl.tensor
    kv_len: gl.tensor
    lo: gl.tensor
    hi: gl.tensor
    n_q: gl.tensor
    SEEN_ROWS: gl.constexpr
    SEEN_KEYS: gl.constexpr
    GROUP: gl.constexpr
    BLOCK_Q: gl.constexpr
    BLOCK_KV: gl.constexpr

    @gluon.jit
    def at(self, position):
        """Returns a copy of this object for the head at `position` of the launch order, which goes through the batch
        elements one by one.
        """
        heads = self.q_heads // self.GROUP
        place = position % self.q_heads
        return replace(self, batch=position // self.q_heads, head=place % heads, member=place // heads)

    @gluon.jit
    def first_row(self):
        """Returns the index of the first query that sees any key under the band.

        The TMA descriptors of Q and dO begin there: this query is their row 0.
        """
        first, _end = self.SEEN_ROWS(self.facts(), self.BLOCK_Q, self.BLOCK_KV)
        return first

    @gluon.jit
    def first_key(self):
        """Returns the index of the first key that any query sees under the band.

        The TMA descriptors of K and V begin there: this key is their row 0.
        """
        first, _end = self.SEEN_KEYS(self.facts(), self.BLOCK_Q, self.BLOCK_KV)
        return first

    @gluon.jit
    def facts(self):
        """Returns (q_len, kv_len, lo, hi), which the schedule's generated functions take as `tile_schedule`."""
        return self.q_len, self.kv_len, self.lo, self.hi

    @gluon.jit
    def q_head(self):
        """Returns the index of the query head within its batch element."""
        return self.head * self.GROUP + self.member

    @gluon.jit
    def tile_index(self, q):
        """Returns the index of q tile `q` of this head among those of all batch elements and query heads.

        Semaphores, dq accumulator, log-sum-exp and delta are indexed by it.
        """
        return (self.batch * self.q_heads + self.q_head()) * self.n_q + q
