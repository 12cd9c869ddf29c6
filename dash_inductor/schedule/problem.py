"""`Problem`: the description of an attention backward that schedules need; requires the standard library alone."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from ..errors import ArgumentError
from ..model.mask import MAX_LENGTH, Band


@dataclass(frozen=True)
class Problem:
    """An attention backward, as far as schedules depend on it.

    Args:
        band: the mask; any anchor.
        q_len, kv_len: lengths in tokens, >= 1.
        block_q, block_kv: tile shape in tokens.
        batch: number of batch elements.
        heads: heads of the schedule per batch element, see `jobs.scheduled_query_heads`.
        group: query heads that one CTA processes, in ascending order.
        head_chunk: heads that are launched together.

    Raises:
        ArgumentError: a number below 1, or a length or bound above `MAX_LENGTH` in magnitude.
    """

    band: Band
    q_len: int
    kv_len: int
    block_q: int
    block_kv: int
    batch: int = 1
    heads: int = 1
    group: int = 1
    head_chunk: int = 1

    def __post_init__(self) -> None:
        for f in fields(self)[1:]:
            if getattr(self, f.name) < 1:
                raise ArgumentError(f.name, getattr(self, f.name), "an integer >= 1")
        far = {"q_len": self.q_len, "kv_len": self.kv_len, "band.lo": self.band.lo or 0, "band.hi": self.band.hi or 0}
        for name, value in far.items():
            if abs(value) > MAX_LENGTH:
                raise ArgumentError(name, value, f"at most {MAX_LENGTH} in magnitude")

    @property
    def n_q(self) -> int:
        """Number of query tiles."""
        return -(-self.q_len // self.block_q)

    @property
    def n_kv(self) -> int:
        """Number of kv tiles."""
        return -(-self.kv_len // self.block_kv)

    @property
    def resolved(self) -> Problem:
        """The same problem with the mask anchored top left, as the generated functions expect it.

        Bounds that exclude nothing are kept: whether a bound exists is a property of the mask, not of the lengths.
        """
        offset = self.kv_len - self.q_len if self.band.anchor == "bottom_right" else 0
        lo, hi = (None if x is None else x - offset for x in (self.band.lo, self.band.hi))
        return replace(self, band=Band(lo, hi))

    def tail(self) -> tuple[tuple[int, ...], int, int]:
        """Return the last arguments of most generated functions: (q_len, kv_len, lo, hi), block_q and block_kv."""
        return (self.q_len, self.kv_len, *self.bounds), self.block_q, self.block_kv

    def steps(self, kv: int) -> int:
        """Return how many q tiles see part of a kv tile, the length of its tile schedule in every schedule."""
        lo, hi = self.resolved.band.lo, self.resolved.band.hi
        first, end = 0, self.n_q
        if hi is not None:
            end = min(end, -(-max(0, min((kv + 1) * self.block_kv, self.kv_len) + hi) // self.block_q))
        if lo is not None:
            row = kv * self.block_kv + lo
            first = max(0, row) // self.block_q if row < self.q_len else end
        return max(0, end - first)

    @property
    def bounds(self) -> tuple[int, int]:
        """The bounds (lo, hi) of the band as ints, relative to the top left corner; 0 for a missing bound."""
        band = self.resolved.band
        return band.lo or 0, band.hi or 0
