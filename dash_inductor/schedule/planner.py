"""`plan`: from the facts of a site to what runs there, as a pure function.

Bits may depend on dtype, head dim, heads, mask and architecture, not on batch or on which lengths are static: a graph
with dynamic lengths and one with static lengths must agree.  So schedule and tiles are chosen on a fixed nominal
problem (`costs.NOMINAL_LEN` square, `costs.NOMINAL_BATCH` x `costs.NOMINAL_HEADS`, `costs.WORKERS` CTAs at a time):
each candidate of `costs.candidates` is run through the simulator with its costs, which gives the critical path of the
DAG weighted by those costs, and the shortest wins (a candidate whose work alone is longer is not simulated).  Ties go
to the earlier candidate.  Schedules that need co-residency are never chosen, only taken when named.

Lengths decide two things.  `section`, the launch grouping, never changes bits.  The forward (`forwards`) depends on how
the lengths compare as far as that is known; the numerics key shows the outcome.
"""

from __future__ import annotations

import heapq
from functools import lru_cache

from ..errors import ArgumentError
from . import costs, forwards
from .costs import Candidate
from .jobs import Problem, functions, resident, tables
from .problem import MAX_LENGTH, Band, Plan, Site, Tiles
from .schedules import NAMES, check_name, supports
from .schedules import schedule as definition
from .simulator import Costs, simulate

_BITS = {"float16": 16, "bfloat16": 16, "float32": 32}


def plan(site: Site, arch: str, schedule: str | None = None, *, compiler: str = "") -> Plan:
    """What runs at `site` on architecture `arch` ("sm_80", "sm_89", "sm_90", "sm_100" or "cpu").

    Args:
        schedule: take this schedule instead of choosing one; it must support the mask.
        compiler: settings of the compiler that may change bits (`toolchain.settings`); part of the numerics key.

    An architecture of `costs.SAME_AS` gets the plan of its relative, under a numerics key of its own.

    Raises:
        ArgumentError: an unknown architecture or schedule, a schedule that does not support the mask, or dimensions
            that no kernel covers.
    """
    _check(site, arch, schedule)
    tables_of = costs.SAME_AS.get(arch, arch)
    name, candidate, length = _choose(tables_of, _candidates(site, arch), site.mask, schedule)
    tf32 = site.allow_tf32 and site.dtype == "float32" and site.device == "cuda"
    kernel = candidate.kernel if site.device == "cuda" else "reference"
    forward, why = forwards.choose(site, tables_of)
    section = _section(name, site, tables_of, candidate)
    key = _numerics_key(site, arch, kernel, name, candidate, forward, tf32)
    key += f"/{compiler}" if compiler else ""
    return Plan(kernel, name, forward, candidate.dkdv, candidate.dq, section, tf32, length, key, why)


def _check(site: Site, arch: str, schedule: str | None) -> None:
    _check_arch(arch)
    if (arch == "cpu") != (site.device == "cpu"):
        raise ArgumentError("arch", arch, "'cpu' exactly for sites on the cpu")
    if site.dtype not in _BITS:
        raise ArgumentError("dtype", site.dtype, _BITS)
    for name, dim in (("head_dim", site.head_dim), ("value_dim", site.value_dim)):
        if dim < 8 or dim % 8:
            raise ArgumentError(name, dim, "a multiple of 8")
    if not covers(site, arch):
        allowed = "equal head dims up to 128; 16-bit on sm_90: up to 256, and 136 to 192 beside v of 72 to 128"
        raise ArgumentError("head_dim, value_dim", (site.head_dim, site.value_dim), allowed)
    for name, length in (("q_len", site.q_len), ("kv_len", site.kv_len)):
        if length is not None and length > MAX_LENGTH:
            raise ArgumentError(name, length, f"at most {MAX_LENGTH}")
    if site.kv_heads < 1 or site.q_heads < 1 or site.q_heads % site.kv_heads:
        raise ArgumentError("q_heads", site.q_heads, f"a multiple of kv_heads={site.kv_heads}")
    if schedule is not None:
        check_name(schedule)
        reason = supports(schedule, site.mask)
        if reason is not None:
            raise ArgumentError("schedule", schedule, f"one that supports the mask {site.mask}: {reason}")


def _check_arch(arch: str) -> None:
    if arch not in costs.WORKERS and arch not in costs.SAME_AS:
        raise ArgumentError("arch", arch, [*costs.WORKERS, *costs.SAME_AS])


def covers(site: Site, arch: str) -> bool:
    """Whether a kernel has the head dims of `site` on `arch`.

    Raises:
        ArgumentError: an unknown architecture.
    """
    _check_arch(arch)
    return bool(_candidates(site, arch))


def _candidates(site: Site, arch: str) -> tuple[Candidate, ...]:
    return costs.candidates(costs.SAME_AS.get(arch, arch), _BITS[site.dtype], site.head_dim, site.value_dim)


@lru_cache(maxsize=256)
def _choose(
    arch: str, candidates: tuple[Candidate, ...], mask: Band, schedule: str | None
) -> tuple[str, Candidate, float]:
    """(schedule, tiles, critical path) with the shortest critical path on the nominal problem."""
    best: tuple[str, Candidate, float] | None = None
    for candidate in candidates:
        for name in NAMES if schedule is None else (schedule,):
            if (name == "two_pass") != (candidate.dq is not None) or supports(name, mask) is not None:
                continue
            if schedule is None and definition(name, mask).resident is not None:
                continue
            if best is not None and schedule is None and _work(name, candidate, mask, arch) >= best[2]:
                continue  # cannot be shorter
            length = critical_path(name, candidate, mask, arch)
            if best is None or length < best[2]:
                best = name, candidate, length
    if best is None:
        raise ArgumentError("schedule", schedule, "one of a single pass: these head dims have no kernels of two passes")
    return best


def critical_path(name: str, candidate: Candidate, mask: Band, arch: str) -> float:
    """Predicted time of the nominal problem, in units of one 128 x 128 tile pair (see `costs`)."""
    kernels = _kernels(name, candidate, mask, arch)
    return round(sum(_makespan(name, problem, prices, arch) for problem, prices in kernels), 6)


def _work(name: str, candidate: Candidate, mask: Band, arch: str) -> float:
    """A lower bound of `critical_path`: the work, spread evenly over the workers."""
    total = 0.0
    for problem, prices in _kernels(name, candidate, mask, arch):
        step = max(prices.compute, prices.reduce) if prices.depth else prices.compute + prices.reduce
        total += problem.batch * problem.heads * sum(_steps(name, problem)) * step
    return total / costs.WORKERS[arch]


def _kernels(name: str, candidate: Candidate, mask: Band, arch: str) -> list[tuple[Problem, Costs]]:
    """The kernels of a candidate on the nominal problem, with what a step costs in each."""
    if candidate.dq is None:
        return [_kernel(name, candidate, candidate.dkdv, Band(mask.lo, mask.hi), arch, matmuls=5)]
    # The dq kernel is the same loop seen from the other side: q tiles own, kv tiles stream by.
    lo, hi = (None if x is None else -x for x in (mask.hi, mask.lo))
    swapped = Tiles(candidate.dq.block_kv, candidate.dq.block_q, candidate.dq.num_warps, candidate.dq.num_stages)
    return [
        _kernel(name, candidate, candidate.dkdv, Band(mask.lo, mask.hi), arch, matmuls=4),
        _kernel(name, candidate, swapped, Band(lo, hi), arch, matmuls=3),
    ]


def _kernel(
    name: str, candidate: Candidate, tiles: Tiles, band: Band, arch: str, matmuls: int
) -> tuple[Problem, Costs]:
    length = costs.NOMINAL_LEN  # square, so the band's anchor does not matter
    section = _launched_together(name, band, arch, -(-length // tiles.block_kv))
    problem = Problem(
        band, length, length, tiles.block_q, tiles.block_kv, costs.NOMINAL_BATCH, costs.NOMINAL_HEADS, section=section
    )
    compute = matmuls * candidate.matmul * tiles.block_q * tiles.block_kv / 128**2
    reduce = candidate.reduce * tiles.block_q / 128
    return problem, Costs(compute, reduce, candidate.handover, depth=candidate.depth)


def _steps(name: str, problem: Problem) -> list[int]:
    """Tile pairs per kv tile."""
    count = functions(name, problem).dash_num_steps
    return [count(kv, *problem.tail()) for kv in range(problem.n_kv)]


def _makespan(name: str, problem: Problem, prices: Costs, arch: str) -> float:
    """Simulated time of one kernel; without waits (two passes, or one worker) that is plain list scheduling."""
    if definition(name, problem.band).shared_accumulator and costs.WORKERS[arch] > 1:
        workers = max(costs.WORKERS[arch], resident(name, problem))
        return simulate(tables(name, problem), workers, prices).makespan
    steps = _steps(name, problem)
    free = [0.0] * costs.WORKERS[arch]
    for _ in range(problem.batch * problem.heads):
        for count in steps:
            heapq.heapreplace(free, free[0] + count * (prices.compute + prices.reduce))
    return max(free)


def _launched_together(name: str, mask: Band, arch: str, kv_tiles: int) -> int:
    """Heads per section: where nobody waits, a few balance the tail of a mask; else about two waves of CTAs."""
    if name in ("shift", "symmetric_shift"):
        return 1
    if name == "two_pass":
        return 1 if mask.is_full else 4
    return min(64, 1 << (-(-2 * costs.WORKERS[arch] // kv_tiles) - 1).bit_length())


def _section(name: str, site: Site, arch: str, candidate: Candidate) -> int:
    length = costs.NOMINAL_LEN if site.kv_len is None else site.kv_len
    if candidate.kernel == "hopper":
        return _fits_l2(site, max(length, costs.NOMINAL_LEN if site.q_len is None else site.q_len))
    return _launched_together(name, site.mask, arch, -(-length // candidate.dkdv.block_kv))


def _fits_l2(site: Site, length: int) -> int:
    """Query heads whose q, do and fp32 dq fit the L2 cache together: every kv tile reads and adds to them."""
    heads = max(1, costs.L2_BYTES // (8 * length * max(64, costs.padded(site.head_dim))))
    if site.batch is not None:
        heads = min(heads, site.batch * site.q_heads)
    return 1 << (int(heads).bit_length() - 1)


def _numerics_key(site: Site, arch: str, kernel: str, name: str, candidate: Candidate, forward: str, tf32: bool) -> str:
    """Everything that can change a bit of a gradient.  Stages, section, batch and lengths cannot."""
    tiles = [f"dkdv={_shape(candidate.dkdv)}"] + ([f"dq={_shape(candidate.dq)}"] if candidate.dq else [])
    dims = f"d{site.head_dim}" if site.value_dim == site.head_dim else f"d{site.head_dim}v{site.value_dim}"
    facts = [site.dtype + ("+tf32" if tf32 else ""), dims, str(site.mask), f"heads{site.q_heads}:{site.kv_heads}", arch]
    return "/".join([f"v{costs.NUMERICS_VERSION}", kernel, name, *tiles, *facts, f"forward={forward}"])


def _shape(tiles: Tiles) -> str:
    return f"{tiles.block_q}x{tiles.block_kv}w{tiles.num_warps}"
