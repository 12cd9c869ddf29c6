"""`Tables`: the tile schedule of a data-dependent mask, which is the closed form of its band without the hidden tile
pairs.

Note [Tables]
    A schedule orders the tile pairs of a band.  Data can hide more of them, but add none.  So the tile schedule of a kv
    tile is its tile schedule in the closed form, restricted to the visible pairs, and the rank of a kv tile at a q tile
    is the number of visible contributors whose rank in the closed form is lower.  The assignment of kv tiles to CTAs,
    and the order in which CTAs are launched, stay the same.

    *Progress.*  In a launch-ordered schedule every contributor of lower rank has an earlier work id.  That is true of
    any subset of the contributors, so every wait is still for an earlier work id, on any number of CTAs.  This argument
    fails for schedules whose CTAs wait in both directions; these are not restricted.

    *Bits.*  A hidden tile pair would add zeros.  A mask that hides nothing therefore has the bits of its band, and the
    results of a batch element depend only on its own mask.

Note [Seen bits]
    With a dense mask a forward reads, for every pair of a row block and a kv tile, one bit for each query and key: 1 if
    both exist, and the whole mask, including its band and segment ids, lets the query see the key.

    The bits are laid out as the scores are after a matmul, which gives each thread four scores of 16 rows and 8
    columns: thread ``4 r + l`` of a warp has rows r and ``r + 8`` and columns ``2 l`` and ``2 l + 1``.  So in word w of
    the thread ``4 r + l`` of the rows from ``16 m`` on, bit ``4 n + 2 i + j`` belongs to row ``16 m + 8 i + r`` and to
    key ``64 w + 8 n + 2 l + j``.  A thread has a word for every 64 keys, and words are ordered by m, r, l and w.

    A backward reads the same bits for every pair of a kv tile and a q tile, laid out as its scores, which are
    transposed: rows are keys.  Its warps are placed along the rows first, then along the columns.  So in warp
    ``m + M c``, of M along the rows, bit ``4 n + 2 i + j`` of thread ``4 r + l`` belongs to key ``16 m + 8 i + r`` and
    to query ``C c + 8 n + 2 l + j``, where C is the number of columns of a warp.  Every 32 bits are a word, and words
    are ordered by their number, then by warp and thread.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..errors import ArgumentError
from .tile_schedule import ClosedForm, Problem
from .visibility import EMPTY, FULL, Pairs

TILE_BITS = 15
"""Bits of a q tile, and of a rank, in the packed tile id of a step."""
FORWARD_TILE_BITS = 16
"""Bits of a kv tile in a packed tile id of a forward's tile schedule; two bits for each of its row blocks follow."""
FORWARD_UNSEEN = FORWARD_TILE_BITS + 2 * 3
"""The bit above those of three row blocks: the kv tile has keys that no query sees."""


def packed_tile(q: int, rank: int, needs_mask: bool, has_blind: bool = False) -> int:
    """Return one step of a tile schedule as the packed tile id that kernels read.

    Args:
        q: the q tile.
        rank: the rank of the step's contribution to dq.
        needs_mask: whether the tile pair is partially hidden.
        has_blind: whether a query of the q tile sees no key at all; the packed tile id is then negative.  This requires
            `needs_mask`.
    """
    return q | rank << TILE_BITS | needs_mask << 2 * TILE_BITS | -has_blind << 31


def from_the_end(has_lo: bool, has_dense: bool) -> bool:
    """Return whether a forward begins with the last queries of a head, so that the longest tile schedules do not come
    last.

    Args:
        has_lo: whether the band has a lower bound, as a causal mask does.
        has_dense: whether there is a dense mask; most of these are causal.
    """
    return has_lo or has_dense


def seen_words(block_kv: int) -> int:
    """Return how many 32-bit words of a dense mask's bits each thread reads for a kv tile; see Note [Seen bits].

    Args:
        block_kv: the number of keys in the tile, a power of two >= 8.
    """
    return max(1, block_kv // 64)


def backward_words(block_q: int, block_kv: int, num_warps: int) -> tuple[int, int]:
    """Return the words of a dense mask's bits that a backward has for a tile pair: (words per thread, threads).

    See Note [Seen bits]; num_warps: of the consumers.
    """
    threads = 32 * num_warps
    return max(1, block_q * block_kv // threads // 32), threads


def forward_packed_tiles(kinds: Sequence[Sequence[int]], partial: int, unseen: Collection[int] = ()) -> list[int]:
    """Return the kv tiles that a forward visits for one tile of queries, last kv tile first, one packed tile id
    for each.

    A packed tile id holds the index of the kv tile (`FORWARD_TILE_BITS` bits), then two bits for each row block
    (EMPTY, PARTIAL or FULL), and at bit `FORWARD_UNSEEN` whether the kv tile is in `unseen`.  Tiles that
    are EMPTY for all row blocks are left out, but there is always at least one packed tile id.

    Args:
        kinds: for each row block of the q tile, EMPTY, PARTIAL or FULL for every kv tile; all EMPTY for a
            row block that does not exist.
        partial: the value of PARTIAL.  A row block that sees nothing has it in the first packed tile id.
        unseen: the kv tiles with keys that no query sees.
    """
    n_kv = len(kinds[0])
    listed = [kv for kv in reversed(range(n_kv)) if any(row[kv] != EMPTY for row in kinds)] or [n_kv - 1]
    packed_tiles = []
    for i, kv in enumerate(listed):
        packed_tile = kv | (kv in unseen) << FORWARD_UNSEEN
        for c, row in enumerate(kinds):
            kind = partial if i == 0 and not any(row) else row[kv]
            packed_tile |= kind << FORWARD_TILE_BITS + 2 * c
        packed_tiles.append(packed_tile)
    return packed_tiles


class Tables:
    """The order in which kernels visit the tile pairs of a data-dependent mask; implements
    `tile_schedule.TileSchedule`, see Note [Tables].

    Args:
        name: a launch-ordered schedule: one whose CTAs wait only for CTAs that are launched earlier.
        problem: batch, heads, lengths, tile shape and band.
        pairs: for each batch element, or for each batch element and head of the schedule, the kind of every
            tile pair, [q tiles][kv tiles]; pairs that the band hides must be EMPTY.

    Raises:
        ArgumentError: a schedule whose CTAs wait for later ones, a wrong number of tile pairs, or more
            tiles than a packed tile id of a step can index.
    """

    parts, shared_accumulator, co_resident, resident = 1, True, False, 1

    def __init__(self, name: str, problem: Problem, pairs: Sequence[Pairs]) -> None:
        self._closed = ClosedForm(name, problem)
        if self._closed.co_resident or not self._closed.shared_accumulator:
            raise ArgumentError("schedule", name, "a launch-ordered schedule")
        for axis, tiles in (("q tiles", problem.n_q), ("kv tiles", problem.n_kv)):
            if tiles > 1 << TILE_BITS:
                raise ArgumentError(axis, tiles, f"at most {1 << TILE_BITS}")
        shape = {(len(element), *{len(row) for row in element}) for element in pairs}
        if len(pairs) not in (problem.batch, problem.batch * problem.heads) or shape != {(problem.n_q, problem.n_kv)}:
            allowed = f"[batch or heads][{problem.n_q} q tiles][{problem.n_kv} kv tiles]"
            raise ArgumentError("pairs", f"{len(pairs)} of {sorted(shape)}", allowed)
        self.problem, self.pairs, self.work_ids = problem, pairs, self._closed.work_ids
        self._by_head = len(pairs) != problem.batch

    def launch(self, work_id: int) -> tuple[int, int]:
        return self._closed.launch(work_id)

    def kv_tile(self, head: int, cta_index: int, part: int) -> int | None:
        return self._closed.kv_tile(head, cta_index, part)

    def tile_schedule(self, head: int, kv: int) -> list[int]:
        """Return the q tiles of a kv tile, in the order of its steps."""
        pairs, closed = self._pairs(head), self._closed
        tiles = (closed.q_tile(head, kv, step) for step in range(closed.visits(head, kv)))
        return [q for q in tiles if pairs[q][kv] != EMPTY]

    def visits(self, head: int, kv: int) -> int:
        return len(self.tile_schedule(head, kv))

    def q_tile(self, head: int, kv: int, step: int) -> int:
        return self.tile_schedule(head, kv)[step]

    def rank(self, head: int, q: int, kv: int) -> int:
        own = self._closed.rank(head, q, kv)
        return sum(self._closed.rank(head, q, other) < own for other in self.visible(head, q))

    def visible(self, head: int, q: int) -> Sequence[int]:
        row = self._pairs(head)[q]
        return [kv for kv in self._closed.visible(head, q) if row[kv] != EMPTY]

    def needs_mask(self, head: int, q: int, kv: int) -> bool:
        return self._pairs(head)[q][kv] != FULL

    def kind(self, head: int) -> int:
        return head  # no two heads are assumed equal: this class only serves checks of small problems

    def packed_tiles(self, head: int, kv: int, blind: Collection[int] = ()) -> list[int]:
        """Return a kv tile's steps as kernels read them; `blind`: q tiles with queries that see no key."""
        steps = ((q, self.rank(head, q, kv), self.needs_mask(head, q, kv)) for q in self.tile_schedule(head, kv))
        return [packed_tile(q, rank, needs_mask, q in blind) for q, rank, needs_mask in steps]

    def _pairs(self, head: int) -> Pairs:
        return self.pairs[head if self._by_head else head // self.problem.heads]
