"""`Tables`: the walk of a mask that is data, counted from the tile pairs that each batch element sees.

Note [Bent fold]
    Every wait is for an earlier ticket exactly where the contributors of each q tile are ranked in launch order.  So
    ranks are counted and never designed, and a schedule is an order of the kv tiles plus a walk for each.

    *Order.*  Let ``n`` be the number of q tiles that see a kv tile, and ``top`` the largest ``n`` of all kv tiles with
    which it shares a q tile: in a document, the length of the document.  A kv tile is *long* if ``2 n > top`` and
    ``top >= LEAST``.  In phase 0 the long ones are launched, those of the largest top first, and of one top the
    shortest first.  In phase 1 the others follow, longest first.  So the last tickets are the shortest.

    *Walk.*  A kv tile walks up through the q tiles where its rank still changes, and then down through the stretch in
    which it is constant, if that is a quarter of its q tiles or more (`bent`).  In a causal document each long kv tile
    goes up its triangle, and then down from the end through the rectangle that all long ones share.  It reaches the
    rectangle when the one before it has left, even if all of them start together.

    *Launch.*  Sections of (batch element, head) pairs, all of phase 0 before phase 1, and in a section in the order of
    (length, place).  No step swaps two kv tiles of one batch element and head, so every wait stays for an earlier
    ticket, on any number of CTAs.

    Order, walks and ranks of a batch element are functions of its own tile pairs.  The section, the other batch
    elements and the number of heads decide when a CTA starts, and never a bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from ..errors import ArgumentError
from .visibility import EMPTY, FULL, Pairs

LEAST = 32
"""Walks shorter than this are not folded: it would gain nothing, and launch them too early."""

LATER = 4
"""Sections of phase 1 are so many times as large as those of phase 0."""

TILE_BITS = 15
"""Bits of a q tile and of a rank in a table's entry."""


def entry(q: int, rank: int, needs_mask: bool) -> int:
    """One step of a walk as the kernels read it: an int32."""
    return q | rank << TILE_BITS | needs_mask << 2 * TILE_BITS


def section_of(pairs: int, n_kv: int, least: int, workers: int) -> int:
    """(batch element, head) pairs that are launched together, of so many: two waves of CTAs, or all if there are few.

    Args:
        least: at least so many; 2 under a causal mask, whose neighbours in launch order begin at different q tiles, and
            8 elsewhere.
        workers: CTAs that run at a time.
    """
    return pairs if pairs <= 4 else min(pairs, max(least, -(-2 * workers // n_kv)))


def bent(tiles: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """The walk of a kv tile through its q tiles, given in ascending order with its rank at each.

    Up to the stretch of equal ranks round three quarters of the list, down through it, and up through the rest.  All
    the way up where the stretch is shorter than a quarter of the list, and all the way down where a rank falls.
    """
    n = len(tiles)
    changes = [i for i in range(1, n) if ranks[i] != ranks[i - 1]]
    first = max((i for i in changes if i <= 3 * n // 4), default=0)
    end = min((i for i in changes if i > 3 * n // 4), default=n)
    if any(ranks[i] < ranks[i - 1] for i in changes):
        first, end = 0, n
    elif 4 * (end - first) < n:
        first = end = 0
    return [*tiles[:first], *reversed(tiles[first:end]), *tiles[end:]]


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Walks in the order in which a forward launches them, which waits for nobody; equal ones in ascending order."""
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


class BentFold:
    """Order, ranks and walks of one batch element; see Note [Bent fold].

    Attributes:
        see: for each kv tile, the q tiles that see it, ascending.
        phase, priority: for each kv tile; launched in ascending order of both, then in the order of places.
        order, place: kv tiles in launch order, and where each stands in it.
        rank: for each kv tile, its rank by q tile.
        walk: for each kv tile, the q tiles in the order of its steps.
        contributors: for each q tile, the kv tiles that it sees, ascending.
    """

    def __init__(self, pairs: Pairs) -> None:
        n_q, n_kv = len(pairs), len(pairs[0])
        self.see = [[q for q in range(n_q) if pairs[q][kv] != EMPTY] for kv in range(n_kv)]
        self.contributors = [[kv for kv in range(n_kv) if pairs[q][kv] != EMPTY] for q in range(n_q)]
        longest = [max((len(self.see[kv]) for kv in kvs), default=0) for kvs in self.contributors]
        keys = [self._key(kv, max((longest[q] for q in self.see[kv]), default=0)) for kv in range(n_kv)]
        self.phase, self.priority = [key[0] for key in keys], [key[1] for key in keys]
        self.order = sorted(range(n_kv), key=lambda kv: keys[kv])
        self.place = [self.order.index(kv) for kv in range(n_kv)]
        self.rank: list[dict[int, int]] = [{} for _ in range(n_kv)]
        for q, kvs in enumerate(self.contributors):
            for rank, kv in enumerate(sorted(kvs, key=lambda kv: self.place[kv])):
                self.rank[kv][q] = rank
        self.walk = [bent(tiles, [self.rank[kv][q] for q in tiles]) for kv, tiles in enumerate(self.see)]

    def _key(self, kv: int, top: int) -> tuple[int, int, int, int]:
        n = len(self.see[kv])
        return (0, -top, n, -kv) if 2 * n > top >= LEAST else (1, -n, kv, 0)


def launch_order(folds: Sequence[BentFold], heads: int, section: int) -> Iterator[tuple[int, int, int]]:
    """(batch element, head within it, kv tile) of every ticket.

    The heads of a batch element are launched in their order wherever they share a kv tile, so that sums over the
    members of a group, which are heads in ascending order, wait for earlier tickets too.
    """
    batch = len(folds)
    for phase in range(2):
        pairs = section * LATER if phase else section
        elements, together = min(batch, pairs), max(1, pairs // batch)
        for first in range(0, batch, elements):
            rows = sorted(
                (fold.priority[kv], fold.place[kv], b, kv)
                for b, fold in enumerate(folds[first : first + elements], first)
                for kv in fold.order
                if fold.phase[kv] == phase
            )
            for head in range(0, heads, together):
                for *_, b, kv in rows:
                    yield from ((b, h, kv) for h in range(head, min(heads, head + together)))


class Tables:
    """The walk of a mask that is data (the protocol `walk.Walk`).

    A slot is the place of a kv tile in its batch element's launch order.

    Args:
        pairs: for each batch element its tile pairs, all of one shape.
        heads: heads of the schedule per batch element, see `jobs.walked_query_heads`.
        section: (batch element, head) pairs that are launched together, see `section_of`; changes no bit.

    Raises:
        ArgumentError: no or unequal tile pairs, more tiles than an entry has bits for, or a number below 1.
    """

    parts, shared_accumulator, co_resident, resident = 1, True, False, 1

    def __init__(self, pairs: Sequence[Pairs], heads: int = 1, section: int = 1) -> None:
        shapes = {(len(element), len(row)) for element in pairs for row in element}
        if len(shapes) != 1 or len({len(element) for element in pairs}) != 1 or (0 in next(iter(shapes))):
            raise ArgumentError(
                "pairs", sorted(shapes), "batch elements of one shape [q tiles][kv tiles], at least one"
            )
        for name, value in (("heads", heads), ("section", section)):
            if value < 1:
                raise ArgumentError(name, value, "an integer >= 1")
        ((self.n_q, self.n_kv),) = shapes
        for name, tiles in (("q tiles", self.n_q), ("kv tiles", self.n_kv)):
            if tiles > 1 << TILE_BITS:
                raise ArgumentError(name, tiles, f"at most {1 << TILE_BITS}")
        self.pairs, self.heads, self.section = pairs, heads, section
        self.folds = [BentFold(element) for element in pairs]
        self.tickets = len(pairs) * heads * self.n_kv

    @cached_property
    def order(self) -> list[tuple[int, int, int]]:
        """(batch element, head within it, kv tile) of every ticket."""
        return list(launch_order(self.folds, self.heads, self.section))

    def launch(self, ticket: int) -> tuple[int, int]:
        b, head, kv = self.order[ticket]
        return b * self.heads + head, self.folds[b].place[kv]

    def kv_tile(self, head: int, slot: int, part: int) -> int:
        return self._fold(head).order[slot]

    def visits(self, head: int, kv: int) -> int:
        return len(self._fold(head).see[kv])

    def q_tile(self, head: int, kv: int, step: int) -> int:
        return self._fold(head).walk[kv][step]

    def rank(self, head: int, q: int, kv: int) -> int:
        return self._fold(head).rank[kv][q]

    def visible(self, head: int, q: int) -> Sequence[int]:
        return self._fold(head).contributors[q]

    def contributions(self, head: int, q: int) -> int:
        """How many kv tiles contribute to a q tile."""
        return len(self.visible(head, q))

    def needs_mask(self, head: int, q: int, kv: int) -> bool:
        return self.pairs[self.kind(head)][q][kv] != FULL

    def kind(self, head: int) -> int:
        return head // self.heads

    def entries(self, head: int, kv: int) -> list[int]:
        """The steps of a kv tile's walk as the kernels read them, see `entry`."""
        return [entry(q, self.rank(head, q, kv), self.needs_mask(head, q, kv)) for q in self._fold(head).walk[kv]]

    def _fold(self, head: int) -> BentFold:
        return self.folds[self.kind(head)]
