"""Times of candidates on the nominal problem (their *critical paths*), by which the planner compares them.

The nominal problem has fixed lengths, batch size and heads (`NOMINAL_LEN`, `NOMINAL_BATCH`, `NOMINAL_HEADS`), so that
the choice does not depend on those of a site.  Schedules whose CTAs wait for one another are simulated.  For the Hopper
kernels, critical paths are precomputed for every band that contains the diagonal (`critical_paths.json`, written by
``tools/critical_paths.py``), because a simulation takes 0.1 s and imports sympy.
"""

from __future__ import annotations

import heapq
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..kernels.family import Candidate
from ..model.architectures import WORKERS
from ..model.mask import Band
from ..model.plan import Tiles
from ..model.site import NOMINAL_BATCH, NOMINAL_HEADS, NOMINAL_LEN
from ..schedule.names import CO_RESIDENT, supports
from ..schedule.problem import Problem
from ..schedule.simulator import Costs

ARCH = "sm_90"
"""The architecture whose critical paths are precomputed."""

SCHEDULES = ("ascending", "spt")
"""The schedules whose critical paths are precomputed: those with waiting CTAs that the planner may choose.  `bent_fold`
is not among them: on the nominal problem its tile schedules are too short to be bent, so that it equals `spt`."""


@dataclass(frozen=True)
class Reach:
    """The extent of a band that contains the diagonal, in q tiles below and above a kv tile of the nominal problem.

    Bands of equal reach see the same tile pairs, and so have equal tile schedules.
    """

    below: int
    above: int

    @staticmethod
    def of(band: Band, tiles: Tiles) -> Reach | None:
        """The `Reach` of a band for tiles of this shape; None if the band does not contain the diagonal."""
        most = farthest(tiles)
        below = most.below if band.lo is None else -(band.lo // tiles.block_q)
        above = most.above if band.hi is None else -(-band.hi // tiles.block_q)
        return Reach(min(below, most.below), min(above, most.above)) if below >= 0 and above >= 0 else None

    def band(self, tiles: Tiles) -> Band:
        """Returns a band that reaches this many q tiles of the given shape below and above the diagonal."""
        return Band(-self.below * tiles.block_q, self.above * tiles.block_q)


def farthest(tiles: Tiles) -> Reach:
    """The reach of the full mask on the nominal problem, which is the largest that a band can have with these tiles."""
    rest = (NOMINAL_LEN - tiles.block_kv) // tiles.block_q
    return Reach(rest, rest)


def key(candidate: Candidate) -> str:
    """The key of a candidate in `critical_paths.json`: all that its critical paths depend on besides band and schedule.

    That is the nominal problem, the number of workers, the tile shape and the costs of a step.
    """
    c = candidate
    problem = f"{NOMINAL_BATCH}x{NOMINAL_HEADS}x{NOMINAL_LEN} on {WORKERS[ARCH]}"
    prices = f"matmul={c.matmul} reduce={c.reduce} handover={c.handover} depth={c.depth}"
    return f"{problem}: {c.dkdv.block_q}x{c.dkdv.block_kv} {prices}"


@cache
def _made_in_advance() -> dict[str, dict[str, list[list[float]]]]:
    """The precomputed critical paths: candidate key -> schedule -> [q tiles below] -> [q tiles above]."""
    found = json.loads(Path(__file__).with_name("critical_paths.json").read_text())
    return {
        name: {schedule: [[float(x) for x in row.split()] for row in rows] for schedule, rows in schedules.items()}
        for name, schedules in found.items()
    }


def made_in_advance(name: str, candidate: Candidate, mask: Band, arch: str) -> float | None:
    """The precomputed critical path of a candidate under the schedule `name`; None if the file does not have it."""
    name = "spt" if name == "bent_fold" and supports(name, mask) is None else name
    if arch != ARCH or name not in SCHEDULES or candidate.dq is not None:
        return None
    reach, rows = Reach.of(mask, candidate.dkdv), _made_in_advance().get(key(candidate))
    return None if reach is None or rows is None else rows[name][reach.below][reach.above]


def waits(name: str, arch: str) -> bool:
    """Returns whether CTAs of the schedule `name` wait for one another on `arch`.

    They do if they add to one dq accumulator, as in all schedules but `two_pass`, and if more than one CTA
    can run at a time.
    """
    return name != "two_pass" and WORKERS[arch] > 1


def must_be_simulated(name: str, candidate: Candidate, mask: Band, arch: str) -> bool:
    """Whether `critical_path` has to run the simulator."""
    return waits(name, arch) and made_in_advance(name, candidate, mask, arch) is None


def critical_path(name: str, candidate: Candidate, mask: Band, arch: str) -> float:
    """The time of a candidate on the nominal problem, in units of one 128 x 128 tile pair (see `kernels.family`).

    Args:
        name: the schedule.
        candidate: tile shapes and costs.
        mask: the band whose tile pairs are visited; its anchor does not matter, because the problem is square.
        arch: an architecture with tables of its own.
    """
    known = made_in_advance(name, candidate, mask, arch)
    return simulated(name, candidate, mask, arch) if known is None else known


def simulated(name: str, candidate: Candidate, mask: Band, arch: str) -> float:
    """The critical path without the precomputed table: from the simulator if CTAs wait, else from list scheduling."""
    return round(sum(_makespan(name, *kernel, arch) for kernel in passes(name, candidate, mask, arch)), 6)


def work(name: str, candidate: Candidate, mask: Band, arch: str) -> float:
    """A lower bound of `critical_path`: the total work, divided by the number of workers."""
    total = 0.0
    for problem, prices in passes(name, candidate, mask, arch):
        step = max(prices.compute, prices.reduce) if prices.depth else prices.compute + prices.reduce
        total += problem.batch * problem.heads * sum(map(problem.steps, range(problem.n_kv))) * step
    return total / WORKERS[arch]


def passes(name: str, candidate: Candidate, mask: Band, arch: str) -> list[tuple[Problem, Costs]]:
    """The kernels of a candidate (one, or two for `two_pass`) as nominal problems, with the costs of a step in each."""
    if candidate.dq is None:
        return [_kernel(name, candidate, candidate.dkdv, Band(mask.lo, mask.hi), arch, matmuls=5)]
    # The dq kernel is the same loop with the roles of q and kv swapped: a CTA owns a q tile and visits kv tiles.
    lo, hi = (None if x is None else -x for x in (mask.hi, mask.lo))
    swapped = Tiles(candidate.dq.block_kv, candidate.dq.block_q, candidate.dq.num_warps, candidate.dq.num_stages)
    return [
        _kernel(name, candidate, candidate.dkdv, Band(mask.lo, mask.hi), arch, matmuls=4),
        _kernel(name, candidate, swapped, Band(lo, hi), arch, matmuls=3),
    ]


def _kernel(
    name: str, candidate: Candidate, tiles: Tiles, band: Band, arch: str, matmuls: int
) -> tuple[Problem, Costs]:
    length = NOMINAL_LEN  # square, so the band's anchor does not matter
    head_chunk = launched_together(name, band, arch, -(-length // tiles.block_kv))
    problem = Problem(
        band, length, length, tiles.block_q, tiles.block_kv, NOMINAL_BATCH, NOMINAL_HEADS, head_chunk=head_chunk
    )
    compute = matmuls * candidate.matmul * tiles.block_q * tiles.block_kv / 128**2
    reduce = candidate.reduce * tiles.block_q / 128
    return problem, Costs(compute, reduce, candidate.handover, depth=candidate.depth)


def _makespan(name: str, problem: Problem, prices: Costs, arch: str) -> float:
    """The simulated time of one kernel; if no CTA waits, the makespan of list scheduling."""
    if waits(name, arch):
        from ..schedule.jobs import tables
        from ..schedule.simulator import simulate
        from ..schedule.tile_schedule import ClosedForm

        workers = max(WORKERS[arch], ClosedForm(name, problem).resident)
        return simulate(tables(name, problem), workers, prices).makespan
    steps = [problem.steps(kv) for kv in range(problem.n_kv)]
    free = [0.0] * WORKERS[arch]
    for _ in range(problem.batch * problem.heads):
        for count in steps:
            heapq.heapreplace(free, free[0] + count * (prices.compute + prices.reduce))
    return max(free)


def launched_together(name: str, mask: Band, arch: str, kv_tiles: int) -> int:
    """The number of heads per head chunk (heads whose CTAs are launched together).

    One head for schedules that need co-resident CTAs.  For `two_pass`, whose CTAs do not wait, 4 heads balance the
    uneven tile schedules of a mask at the end of the launch.  Otherwise enough heads for about two waves of CTAs, at
    most 64.
    """
    if name in CO_RESIDENT:
        return 1
    if name == "two_pass":
        return 1 if mask.is_full else 4
    return min(64, 1 << (-(-2 * WORKERS[arch] // kv_tiles) - 1).bit_length())
