"""A schedule written out for one problem: what every CTA does, in order.

Simulator, checks, timeline and reference executor read these tables; they come from the expressions that the kernels
run.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from types import SimpleNamespace

import sympy

from ..errors import ArgumentError
from ..model.mask import MAX_LENGTH, Band
from .codegen import python_functions
from .schedules import PARTS, first_mirrored


@dataclass(frozen=True)
class Problem:
    """One attention backward as the schedules see it.

    Args:
        band: the mask; any anchor.
        q_len, kv_len: lengths in tokens, >= 1.
        block_q, block_kv: tile shape in tokens.
        batch: batch elements.
        heads: heads of the schedule per batch element, see `walked_query_heads`.
        group: query heads that a CTA runs through, in ascending order.
        section: heads that are launched together.
    """

    band: Band
    q_len: int
    kv_len: int
    block_q: int
    block_kv: int
    batch: int = 1
    heads: int = 1
    group: int = 1
    section: int = 1

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
        """Query tiles."""
        return -(-self.q_len // self.block_q)

    @property
    def n_kv(self) -> int:
        """Key/value tiles."""
        return -(-self.kv_len // self.block_kv)

    @property
    def resolved(self) -> Problem:
        """The same problem with the mask anchored top left, as the generated functions want it.

        Bounds that exclude nothing are kept: whether a bound exists is a fact of the mask, not of the lengths.
        """
        offset = self.kv_len - self.q_len if self.band.anchor == "bottom_right" else 0
        lo, hi = (None if x is None else x - offset for x in (self.band.lo, self.band.hi))
        return replace(self, band=Band(lo, hi))

    def tail(self) -> tuple[int, int, int, int, int, int]:
        """The last arguments of the generated functions: lengths, bounds (0 where there is none) and tile shape."""
        band = self.resolved.band
        return self.q_len, self.kv_len, band.lo or 0, band.hi or 0, self.block_q, self.block_kv


@dataclass(frozen=True)
class Column:
    """The walk over one kv tile: (q tile, rank) in order of time."""

    kv: int
    steps: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Job:
    """What the CTA with this ticket does; head is ``b * heads + h``."""

    ticket: int
    head: int
    columns: tuple[Column, ...]


def walked_query_heads(per_query_head: bool, q_heads: int, kv_heads: int) -> tuple[tuple[int, ...], ...]:
    """For each head of the schedule, in its order, the query heads that its CTAs walk for, one after the other.

    Where every query head has CTAs of its own, the query heads are the heads, first member 0 of all groups, then member
    1, and so on.  Elsewhere a kv head is a head, and its CTAs walk for the whole group.  Either way head `h` belongs to
    kv head ``h % kv_heads``.

    Args:
        per_query_head: whether every query head has CTAs of its own (`KernelFamily.cta_per_query_head`).
        q_heads, kv_heads: per batch element.
    """
    group = q_heads // kv_heads
    members = [[kv_head * group + member for kv_head in range(kv_heads)] for member in range(group)]
    if per_query_head:
        return tuple((head,) for heads in members for head in heads)
    return tuple(zip(*members, strict=True))


def functions(name: str, problem: Problem) -> SimpleNamespace:
    """The Python form of the schedule's functions for the problem's mask."""
    return python_functions(name, problem.resolved.band)


def _columns(f: SimpleNamespace, name: str, problem: Problem, slot: int, head: int) -> tuple[Column, ...]:
    tail, columns = problem.tail(), []
    for part in range(PARTS[name]):
        kv = f.dash_kv_tile(slot, part, head, problem.heads, *tail)
        if kv < problem.n_kv:
            steps = range(f.dash_num_steps(kv, *tail))
            walk = (f.dash_q_tile(step, kv, head, problem.heads, *tail) for step in steps)
            columns.append(Column(kv, tuple((q, f.dash_rank(q, kv, head, problem.heads, *tail)) for q in walk)))
    return tuple(columns)


@lru_cache(maxsize=64)
def tables(name: str, problem: Problem) -> tuple[Job, ...]:
    """All jobs in launch order.  Raises ArgumentError on an unknown schedule or an unsupported mask."""
    f, tail = functions(name, problem), problem.tail()
    tickets = problem.batch * problem.heads * f.dash_slots(*tail)
    mirrored = int(first_mirrored(sympy.Integer(problem.heads)))
    seen: dict[tuple[int, bool], tuple[Column, ...]] = {}
    jobs = []
    for ticket in range(tickets):
        head, slot = f.dash_launch(ticket, problem.batch, problem.heads, *tail, problem.section)
        key = (slot, head % problem.heads >= mirrored)
        if key not in seen:
            seen[key] = _columns(f, name, problem, slot, head % problem.heads)
        jobs.append(Job(ticket, head, seen[key]))
    return tuple(jobs)


def resident(name: str, problem: Problem) -> int:
    """Least number of simultaneously resident CTAs with which the schedule cannot hang; 1 for launch-ordered ones."""
    f = functions(name, problem)
    return int(f.dash_resident(problem.batch, problem.heads, *problem.tail(), problem.section))
