"""The definitions of all schedules of the backward, as sympy expressions.

A schedule defines, by sympy expressions in tile indices and lengths, which CTA computes what and when (`kv_tile`,
`q_tile`) and the order in which the partial dq tiles are added (`rank`).  Kernel code, simulator, checks, reference
executor and pictures all evaluate these expressions.  Neither tile schedules nor ranks depend on the number of SMs, the
batch, the heads or the head chunk: the gradients of a head are a function of its own operands and mask, whatever else
is launched.

A *head* is a (batch element, kv head) pair, the unit whose kv tiles CTAs own.  With grouped-query attention a CTA of
the portable kernel processes the query heads of its group in ascending order, each with its own dq accumulators and the
same tile schedule and ranks.  The Hopper kernel has CTAs for every query head: there the query heads are the heads,
first the first member of all groups, then the second, and so on.

Sources: ascending is FlashAttention-3's deterministic order; descending, shift and symmetric shift are from "DASH:
deterministic attention scheduling" (arXiv 2601.21824); shortest first ("SPT") is FlashAttention-3's and -4's order for
causal masks.  The bent fold is a rule for any tile pairs, here in closed form for bands without upper bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import sympy

from ..errors import ArgumentError
from ..model.mask import Band
from .geometry import N_KV, N_Q, Interval, Range, kv_range, q_range, seen_keys, seen_rows
from .names import NAMES as NAMES
from .names import PARTS as PARTS
from .names import check_name as check_name
from .names import supports as supports
from .symbols import (
    CTA_INDEX,
    HEAD_CHUNK,
    HEADS,
    KV,
    LO,
    PART,
    STEP,
    WORK_ID,
    Expr,
    FloorDiv,
    Maximum,
    Minimum,
    Q,
    Rem,
    Where,
    at_least_zero,
    ceil_div,
)


def _grouped(work_id: Expr, ctas_per_head: Expr, heads: Expr, together: Expr = HEAD_CHUNK) -> tuple[Expr, Expr]:
    """Return (position of the head, CTA index) of a work id.

    Work ids are ordered by head chunks of `together` heads, within a chunk by CTA index, and then by head.
    """
    head_chunk, within = FloorDiv(work_id, together * ctas_per_head), Rem(work_id, together * ctas_per_head)
    size = Maximum(1, Minimum(together, heads - head_chunk * together))  # the last head chunk may be smaller
    return head_chunk * together + Rem(within, size), FloorDiv(within, size)


@dataclass(frozen=True)
class Visible:
    """The visible q tiles of kv tile KV and kv tiles of q tile Q, the rows that see a key, and the keys seen."""

    q: Range
    kv: Range
    rows: Interval
    keys: Interval

    @property
    def steps(self) -> Expr:
        """The number of visible q tiles of kv tile KV, as an expression."""
        return self.q.end - self.q.first

    @property
    def up(self) -> Expr:
        """The q tile that kv tile KV visits in step STEP if it visits its q tiles in ascending order."""
        return self.q.first + STEP

    @property
    def down(self) -> Expr:
        """The q tile that kv tile KV visits in step STEP if it visits its q tiles in descending order."""
        return self.q.end - 1 - STEP

    @property
    def rank_up(self) -> Expr:
        """The rank of kv tile KV at q tile Q if kv tiles contribute to it in ascending order."""
        return KV - self.kv.first

    @property
    def rank_down(self) -> Expr:
        """The rank of kv tile KV at q tile Q if kv tiles contribute to it in descending order."""
        return self.kv.end - 1 - KV


@dataclass(frozen=True)
class Schedule:
    """A schedule for one kind of band (which of lo and hi exist).

    Args:
        name: the name used in plans.
        parts: the number of kv tiles that one CTA processes, one after the other.
        ctas_per_head: how many CTAs a head has.
        launch: (work id, heads) -> (head index ``b * heads + h``, CTA index), see `_grouped`.
        kv_tile: (CTA index, part) -> kv tile, or the number of kv tiles for "no tile".
        num_steps: kv -> number of q tiles in the tile schedule.
        q_tile: (step, kv) -> q tile.
        rank: (q, kv) -> position of kv's contribution in the accumulation order of q's dq tile; only for visible pairs.
        visible: the pairs that the band shows, independent of the schedule.
        shared_accumulator: whether CTAs add to a shared dq accumulator and wait for its semaphores.  If not, rank is
            the order in which the owner of the q tile processes the kv tiles.
        resident: None if every wait is for an earlier work id, so that any number of resident CTAs makes progress.
            Otherwise the least number of simultaneously resident CTAs for which the launch cannot hang; the bound is
            exact.
    """

    name: str
    parts: int
    ctas_per_head: Expr
    launch: tuple[Expr, Expr]
    kv_tile: Expr
    num_steps: Expr
    q_tile: Expr
    rank: Expr
    visible: Visible
    shared_accumulator: bool = True
    resident: Expr | None = None


LAST_FIRST = N_KV - 1 - CTA_INDEX
_LAUNCH = _grouped(WORK_ID, N_KV, HEADS)


def _column(name: str, c: Visible, kv_tile: Expr, q_tile: Expr, rank: Expr, *, shared: bool = True) -> Schedule:
    return Schedule(name, 1, N_KV, _LAUNCH, kv_tile, c.steps, q_tile, rank, c, shared_accumulator=shared)


def _ascending(c: Visible) -> Schedule:
    return _column("ascending", c, CTA_INDEX, c.up, c.rank_up)


def _descending(c: Visible) -> Schedule:
    return _column("descending", c, CTA_INDEX, c.down, c.rank_up)


def _spt(c: Visible) -> Schedule:
    return _column("spt", c, LAST_FIRST, c.up, c.rank_down)


def _two_pass(c: Visible) -> Schedule:
    """Two passes: dk/dv CTAs go as in ascending; each CTA of the dq kernel owns a q tile and goes up its kv tiles."""
    return _column("two_pass", c, CTA_INDEX, c.up, c.rank_up, shared=False)


LEAST = 64
"""If the longest tile schedule has fewer q tiles than this, no tile schedule is bent: that would gain less than
downward tile schedules cost.
"""

LATER = 4
"""Factor by which the head chunks of the second phase of a bent fold are larger than those of the first: all tile
schedules of a head begin there at the same q tile, and wait for one another unless those of other heads are launched in
between."""


def _bent_fold(c: Visible, has_lo: bool) -> Schedule:
    """The bent fold, for bands without upper bound: SPT, except that for long sequences its end is changed.

    SPT ends with its longest jobs, while other workers are idle.  Here a kv tile is *long* if its tile schedule is more
    than half of the longest tile schedule with which it shares a q tile, `top`.  Phase 0 launches the long ones,
    shortest first; phase 1 the others, longest first, so that the last work ids are the shortest.  A long kv tile goes
    up through the q tiles where its rank still changes, and then down through the range in which it is constant: it
    reaches the rectangle that all long ones share after the one before it has left, even if all start together.

    Tile 0 has the longest tile schedule and shares a q tile with every other, so it is `top` for all of them.  Tile
    schedules get shorter with kv: the long ones are those below `long`, the number of kv tiles that the last q tile
    sees at which a long tile schedule may begin.  They are launched downwards and the others upwards, so the kv tiles
    ``kv < end_kv(q)`` reach q tile q in the order ``min(end_kv(q), long) - 1 .. 0, long .. end_kv(q) - 1``.  The rank
    of a long one is constant from ``bend = first_q(long - 1)`` on, which is more than a quarter of its tile schedule,
    and that of a short one is kv throughout.  So a long one goes up to the bend and then down from the end, and a short
    one goes down.

    If ``top < LEAST``, all kv tiles are long and none is bent, which is `spt`.

    The tile schedule for the full mask is that for the causal mask plus the steps that the latter lacks: a mask that is
    only known at run time then has the tile schedules and ranks of the causal mask if it is causal.
    """
    assumed = {} if has_lo else {LO: sympy.Integer(0)}

    def first_q(kv: Expr) -> Expr:
        return q_range(True, False, kv=kv).first.xreplace(assumed)

    top = N_Q - first_q(sympy.Integer(0))
    bends = top >= LEAST
    last_short = N_Q - 1 - FloorDiv(top, 2)
    long = Where(bends, kv_range(True, False, q=last_short).end.xreplace(assumed), N_KV)
    bend = Where(bends, first_q(at_least_zero(long - 1)), N_Q)
    up = Where(long > KV, bend - c.q.first, 0)
    first_work_ids = HEADS * long
    second = first_work_ids <= WORK_ID  # a head chunk never mixes the two phases
    head, cta_index = _grouped(
        Where(second, at_least_zero(WORK_ID - first_work_ids), WORK_ID),
        Maximum(1, Where(second, N_KV - long, long)),
        HEADS,
        Where(second, LATER * HEAD_CHUNK, HEAD_CHUNK),
    )
    return Schedule(
        "bent_fold",
        1,
        N_KV,
        (head, cta_index + Where(second, long, 0)),
        Where(long > CTA_INDEX, long - 1 - CTA_INDEX, CTA_INDEX),
        c.steps,
        Where(up > STEP, c.up, c.down + up),
        Where(long > KV, Minimum(c.kv.end, long) - 1 - KV, KV),
        c,
    )


def _ring_start(member: Expr, members: Expr, tiles: Expr) -> Expr:
    """Return the first tile of a member of a ring: members start evenly spread over the tiles."""
    return FloorDiv(member * tiles, members)


def _ring_rank(member: Expr, tile: Expr, members: Expr, tiles: Expr) -> Expr:
    """Return the order in which the members of a ring reach a tile.

    Members with ``start <= tile`` are ``0 .. last`` with ``last = ceil((tile + 1) * members / tiles) - 1`` (from
    ``floor(m * tiles / members) <= tile  <=>  m < (tile + 1) * members / tiles``).  The highest of them is nearest and
    comes first, down to 0; then the ring closes and the others follow, again from the highest.  So the step at which a
    member reaches the tile never decreases along the ranks, for any two counts; with more members than tiles, equal
    steps are ordered by rank.
    """
    return Rem(ceil_div((tile + 1) * members, tiles) - 1 - member + members, members)


def _resident(contributing_ctas: Expr) -> Expr:
    """Return the exact co-residency bound of a ring in which all wait for member ``contributing_ctas - 1``.

    In a head chunk of g heads the last member of the first head has the work id ``(contributing_ctas - 1) * g``.  If it
    is resident, that head finishes and frees its workers for the next work ids.  With fewer workers no head ever gets
    its last member.
    """
    return at_least_zero(contributing_ctas - 1) * Minimum(HEAD_CHUNK, HEADS) + 1


def _shift(c: Visible) -> Schedule:
    """Shift, for the full mask: cyclic tile schedules with evenly spread starts, for any numbers of tiles."""
    return Schedule(
        "shift",
        1,
        N_KV,
        _LAUNCH,
        CTA_INDEX,
        c.steps,
        Rem(_ring_start(KV, N_KV, N_Q) + STEP, N_Q),
        _ring_rank(KV, Q, N_KV, N_Q),
        c,
        resident=_resident(N_KV),
    )


def _symmetric_shift(c: Visible, has_lo: bool) -> Schedule:
    """Symmetric shift, for bands without upper bound: a CTA processes kv tile p, then kv tile n-1-p.

    Let ``pairs = ceil(n / 2)``.  The *big* tiles ``kv < pairs`` all see the q tiles from ``top = first_q(pairs - 1)``
    on: there they form a ring, as in shift.  Then each goes up its triangle, first_q(kv) .. top-1, with the
    highest kv first in rank.  The *small* tiles go down from the last q tile; their rank is kv, as every
    lower tile contributes before them.  No big tile waits for a small one, and a small one only for lower tiles, so the
    waits are acyclic for any lengths, odd n (the middle CTA has no second tile) and any lower bound.  For BLOCK_Q ==
    BLOCK_KV, equal lengths and even n this is DASH's symmetric shift with ``finished = 0, active = n/2``; for BLOCK_KV
    = S * BLOCK_Q starts are about S tiles apart instead of one.
    """
    pairs = ceil_div(N_KV, 2)
    top = q_range(has_lo, False, kv=pairs - 1).first
    height = at_least_zero(N_Q - top)
    ring = Maximum(1, height)
    big = pairs > KV
    step_in_triangle = c.q.first + STEP - height
    tile_schedule_big = Where(height > STEP, top + Rem(_ring_start(KV, pairs, ring) + STEP, ring), step_in_triangle)
    member = Minimum(KV, pairs - 1)
    rank_big = Where(top <= Q, _ring_rank(member, Minimum(at_least_zero(Q - top), ring - 1), pairs, ring), c.rank_down)
    contributing = Minimum(pairs, kv_range(has_lo, False, q=N_Q - 1).end)
    return Schedule(
        "symmetric_shift",
        2,
        pairs,
        _grouped(WORK_ID, pairs, HEADS),
        Where(sympy.Eq(PART, 0), CTA_INDEX, Where(2 * CTA_INDEX + 1 < N_KV, N_KV - 1 - CTA_INDEX, N_KV)),
        Where(N_KV > KV, c.steps, 0),
        Where(big, tile_schedule_big, N_Q - 1 - STEP),
        Where(big, rank_big, KV),
        c,
        resident=_resident(contributing),
    )


_COLUMNS: dict[str, Callable[[Visible], Schedule]] = {
    "ascending": _ascending,
    "descending": _descending,
    "shift": _shift,
    "spt": _spt,
    "two_pass": _two_pass,
}
_LOWER: dict[str, Callable[[Visible, bool], Schedule]] = {
    "symmetric_shift": _symmetric_shift,
    "bent_fold": _bent_fold,
}
"""Schedules for bands without upper bound; the second argument is whether there is a lower bound."""


@cache
def _build(name: str, has_lo: bool, has_hi: bool) -> Schedule:
    bounds = has_lo, has_hi
    visible = Visible(q_range(*bounds), kv_range(*bounds), seen_rows(*bounds), seen_keys(*bounds))
    return _LOWER[name](visible, has_lo) if name in _LOWER else _COLUMNS[name](visible)


def define(name: str, band: Band) -> Schedule:
    """Return the expressions of a schedule for a band.

    Raises:
        ArgumentError: an unknown name or an unsupported mask.
    """
    reason = supports(name, band)
    if reason is not None:
        raise ArgumentError("schedule", name, f"one that supports the mask {band}: {reason}")
    return _build(name, band.lo is not None, band.hi is not None)
