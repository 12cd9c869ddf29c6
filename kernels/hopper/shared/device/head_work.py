"""`HeadWork`: the head that a CTA works on."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....common.device.aggregates import aggregate, replace


@aggregate
class HeadWork:
    """The head that a CTA is at, and what is the same for all of them.

    ``lo <= q - kv <= hi`` is the band of the mask, anchored top left.  Every query head has its own tile schedules:
    `head` is the kv head, `member` the place of the query head in the group of GROUP that shares it.  To the schedule
    the query heads are the heads, member by member of all groups, so that a member of a group is launched after those
    before it.
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
        """Returns a copy for the head at `position` of the launch order, which counts the heads of all batch
        elements.
        """
        heads = self.q_heads // self.GROUP
        place = position % self.q_heads
        return replace(self, batch=position // self.q_heads, head=place % heads, member=place // heads)

    @gluon.jit
    def first_row(self):
        """Returns the first query that sees a key of the band: row 0 of the descriptors of Q and dO."""
        first, _end = self.SEEN_ROWS(self.facts(), self.BLOCK_Q, self.BLOCK_KV)
        return first

    @gluon.jit
    def first_key(self):
        """Returns the first key of the band that a query sees: row 0 of the descriptors of K and V."""
        first, _end = self.SEEN_KEYS(self.facts(), self.BLOCK_Q, self.BLOCK_KV)
        return first

    @gluon.jit
    def facts(self):
        """Returns the tuple that the schedule's generated functions take as `tile_schedule`."""
        return self.q_len, self.kv_len, self.lo, self.hi

    @gluon.jit
    def q_head(self):
        """Returns the query head within its batch element."""
        return self.head * self.GROUP + self.member

    @gluon.jit
    def tile_index(self, q):
        """Returns the index of (batch element, query head, q tile) in semaphores, dq accumulator, log-sum-exp and
        delta.
        """
        return (self.batch * self.q_heads + self.q_head()) * self.n_q + q
