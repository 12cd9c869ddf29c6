"""Predicted times of the Hopper kernels, in microseconds.

A launch is modelled as a list of tile schedules, one per work id, which `WORKERS` CTAs take in launch order as they
become free.  Each tile schedule takes a constant plus a time per iteration (`calibration`).  Waits for semaphores are
not simulated: schedules whose q tiles ascend hardly wait, and the waits of those that descend are part of their
constant.  There is no prediction where waits matter: for `descending` and `ascending` under a causal mask, and for
schedules whose CTAs must be co-resident.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from ...model.architectures import WORKERS
from ...model.mask import Band
from ...model.plan import Plan
from ...model.site import NOMINAL_BATCH, NOMINAL_LEN, Site
from ...schedule.problem import Problem
from ..family import Documents
from .calibration import DATA, Backward, Calibration, Forward
from .kernel_configs import dims_of_tile, suits_parts

ARCH = "sm_90"
"""The architecture of these kernels, the only one that was timed."""

TILE_SCHEDULES = 16384
"""Largest number of simulated tile schedules; of larger launches fewer batch elements are simulated and the mean time
of the others is added."""

MOST_TILE_SCHEDULES = 1 << 18
"""Largest number of tile schedules of a batch element, or of a forward's head, that is simulated: seconds of work."""

MOST_TILE_PAIRS = 1 << 22
"""Largest number of tile pairs of documents that are counted one by one: seconds of work."""


def unpredicted(
    plan: Plan, site: Site, arch: str, gpu: str, rates: Calibration, documents: Documents | None
) -> str | None:
    """Returns in words why the time of a backward is not predicted; None if it is predicted.

    Args:
        rates: the times that were measured on `gpu`.
        documents: the lengths of packed documents in tokens; None if they are unknown or there are none.
    """
    dims = dims_of_tile(site.head_dim, site.value_dim)
    if arch != ARCH:
        return f"{arch} is not calibrated"
    if dims not in rates.backward:
        return f"head dims {site.head_dim} and {site.value_dim} are not calibrated on an {gpu}"
    if site.mask.segments is not None and documents is None:
        return "the time depends on the documents, which are data"
    if site.spec.traits.asks and (dims != (128, 128) or not site.spec.traits.asks <= {"segments", *DATA}):
        kinds = ", ".join(sorted(site.spec.traits.asks))
        return f"{kinds} at head dims {site.head_dim} and {site.value_dim}: not calibrated"
    if not _is_calibrated(_scheduled(site)):
        return f"the mask {site.band} is not calibrated"
    problem = problem_of(plan, site)
    if problem.heads * problem.n_kv > MOST_TILE_SCHEDULES:
        count = f"{problem.heads * problem.n_kv:,} tile schedules of a batch element"
        return f"{count} are too many to simulate, at most {MOST_TILE_SCHEDULES:,} are"
    if documents is not None and _document_tile_pairs(documents, problem) > MOST_TILE_PAIRS:
        return f"the documents have more than {MOST_TILE_PAIRS:,} tile pairs, which are too many to count"
    if plan.schedule in ("shift", "symmetric_shift"):
        return f"{plan.schedule} is not calibrated"
    if _scheduled(site).is_full:
        return "bent_fold is not calibrated under a full mask" if plan.schedule == "bent_fold" else None
    if _all_at_once(problem):
        return None if plan.schedule == "bent_fold" else f"{plan.schedule} is not calibrated where all CTAs run at once"
    if plan.schedule in ("ascending", "descending"):
        return f"CTAs of {plan.schedule} wait for one another under this mask, which is not calibrated"
    return None


def rates_of_forward(site: Site, arch: str, rates: Calibration) -> Forward | None:
    """Returns the measured times (`Forward`) from which a site's forward is predicted; None if none fit the site."""
    dims = dims_of_tile(site.head_dim, site.value_dim)
    found = None if dims is None else rates.forward.get((*dims, site.band.is_window))
    _, q_len, kv_len = _sizes(site)
    if suits_parts(site.spec.traits, q_len, kv_len, site.group):
        return None
    return None if arch != ARCH or site.spec.traits.asks or not _is_calibrated(site.band) else found


def _scheduled(site: Site) -> Band:
    """Returns the band whose tile pairs are assumed to be visible."""
    return site.band if site.likely_band is None else site.likely_band


def _is_calibrated(band: Band) -> bool:
    """Returns whether masks like this one were measured: full ones, causal ones and windows of past tokens."""
    return band.is_full or band.lo == 0


def problem_of(plan: Plan, site: Site) -> Problem:
    """Returns the sizes, tiles and band of a site's backward as the `Problem` from which schedules are computed."""
    batch, q_len, kv_len = _sizes(site)
    tiles = plan.dkdv
    return Problem(
        _scheduled(site), q_len, kv_len, tiles.block_q, tiles.block_kv, batch, site.q_heads, head_chunk=plan.head_chunk
    )  # fmt: skip


def _sizes(site: Site) -> tuple[int, int, int]:
    """Returns batch, q_len and kv_len, with nominal values for dynamic ones."""
    nominal = NOMINAL_BATCH, NOMINAL_LEN, NOMINAL_LEN
    found = site.batch, site.q_len, site.kv_len
    batch, q_len, kv_len = (n if x is None else x for x, n in zip(found, nominal, strict=True))
    return batch, q_len, kv_len


def _all_at_once(problem: Problem) -> bool:
    return problem.batch * problem.heads * problem.n_kv <= WORKERS[ARCH]


def backward_us(plan: Plan, site: Site, calibration: Calibration, documents: Documents | None = None) -> float:
    """Predicts the time of the backward of a site, in microseconds; `unpredicted` must have returned None for it.

    Args:
        documents: the lengths of packed documents in tokens, if the mask depends on them.
    """
    dims = dims_of_tile(site.head_dim, site.value_dim)
    assert dims is not None
    problem, rates = problem_of(plan, site), calibration.backward[dims]
    if documents is not None:
        problem = replace(problem, q_len=sum(documents), kv_len=sum(documents))
    main, idle = _main(plan.schedule, problem, rates, site.group > 1, documents)
    elements = problem.batch * site.q_heads * problem.q_len * site.head_dim / 2**25
    after = max(calibration.after * elements - idle, 0.0)
    plain = calibration.launch + calibration.before * elements + main + after
    return plain * math.prod(DATA[kind] for kind in site.spec.traits.data - {"segments"})


def _main(
    name: str, problem: Problem, rates: Backward, grouped: bool, documents: Documents | None
) -> tuple[float, float]:
    """Predicts the time of the main kernel and the mean idle time of an SM at its end, in microseconds."""
    work_ids = problem.heads * problem.n_kv
    batch = max(1, min(problem.batch, TILE_SCHEDULES // work_ids))
    tile_schedules = _tile_schedules(name, replace(problem, batch=batch), documents)
    always = rates.tile_schedule + (rates.group if grouped else 0.0)
    times = {w: always + w[0] * rates.step + w[1] * rates.masked + w[2] * rates.down for w in set(tile_schedules)}
    whole = _handed_out(times[w] for w in tile_schedules)
    mean = sum(times[w] for w in tile_schedules) / WORKERS[ARCH]
    return whole + (problem.batch - batch) / batch * mean, whole - mean


@lru_cache(maxsize=256)
def _tile_schedules(name: str, problem: Problem, documents: Documents | None) -> tuple[tuple[int, int, bool], ...]:
    """Lists (tile pairs, masked tile pairs, descends) of all tile schedules in launch order.

    `descends` is whether the schedule begins at its last q tile under a mask that lets others of its head begin there
    too.
    """
    from ...schedule.tile_schedule import ClosedForm  # expressions, which need sympy

    tile_schedule = ClosedForm(name, problem)
    tiles = _tiles(name, problem) if documents is None else _tiles_of(documents, problem)
    found: dict[tuple[int, int], tuple[int, int, bool]] = {}
    tile_schedules = []
    for work_id in range(tile_schedule.work_ids):
        head, cta_index = tile_schedule.launch(work_id)
        key = tile_schedule.kind(head), cta_index
        if key not in found:
            kv = tile_schedule.kv_tile(head, cta_index, 0)
            assert kv is not None
            steps = tile_schedule.visits(head, kv)
            down = (
                not problem.band.is_full
                and steps > 1
                and tile_schedule.q_tile(head, kv, 0) > tile_schedule.q_tile(head, kv, 1)
            )
            found[key] = *tiles[kv], down
        tile_schedules.append(found[key])
    return tuple(tile_schedules)


def _tiles(name: str, problem: Problem) -> list[tuple[int, int]]:
    """Lists (tile pairs, masked tile pairs) of each kv tile."""
    from ...schedule.tile_schedule import functions

    q_range, tail = functions(name, problem).dash_q_range, problem.tail()
    ranges = [q_range(kv, *tail) for kv in range(problem.n_kv)]
    return [(end - first, end - first - (full_end - full_first)) for first, full_first, full_end, end in ranges]


def _document_tile_pairs(documents: Documents, problem: Problem) -> int:
    """An upper bound of the tile pairs that `_tiles_of` counts."""
    tiles = ((length // problem.block_q + 2, length // problem.block_kv + 2) for length in documents)
    return problem.n_kv * len(documents) + sum(q * kv for q, kv in tiles)


def _tiles_of(documents: Documents, problem: Problem) -> list[tuple[int, int]]:
    """Computes `_tiles` where tokens see only tokens of their own document."""
    ends = list(itertools.accumulate(documents))
    starts = [0, *ends[:-1]]
    lo, hi = problem.band.lo, problem.band.hi
    found = []
    for first_key in range(0, problem.kv_len, problem.block_kv):
        end_key = min(first_key + problem.block_kv, problem.kv_len)
        whole: dict[int, bool] = {}  # the q tiles that see a key: whether every query sees every key
        for start, end in zip(starts, ends, strict=True):
            if start < end_key and first_key < end:
                first_row = start if lo is None else max(start, max(start, first_key) + lo)
                last_row = end - 1 if hi is None else min(end, min(end, end_key) + hi) - 1
                for q in range(first_row // problem.block_q, last_row // problem.block_q + 1):
                    rows = q * problem.block_q, min((q + 1) * problem.block_q, problem.q_len) - 1
                    inside = start <= min(first_key, rows[0]) and max(end_key - 1, rows[1]) < end
                    above = lo is None or rows[0] - (end_key - 1) >= lo
                    whole[q] = inside and above and (hi is None or rows[1] - first_key <= hi)
        found.append((len(whole), sum(not each for each in whole.values())))
    return found


def _handed_out(times: Iterable[float]) -> float:
    """Returns the time when all jobs are done, if each in turn is given to the worker that becomes free first."""
    free = [0.0] * WORKERS[ARCH]
    for time in times:
        heapq.heapreplace(free, free[0] + time)
    return max(free)


def forward_us(plan: Plan, site: Site, rates: Forward) -> float | None:
    """Predicts the time of the forward of a site, in microseconds; None if it has too many tile schedules.

    Args:
        rates: the calibrated times, as `rates_of_forward` returns them.
    """
    batch, q_len, _ = _sizes(site)
    assert plan.forward_tiles is not None
    if q_len > MOST_TILE_SCHEDULES * plan.forward_tiles.block_q:
        return None
    heads = batch * site.q_heads
    tile_schedules = _forward_tile_schedules(plan, site)
    some = max(1, min(heads, TILE_SCHEDULES // len(tile_schedules)))
    times = [rates.tile + steps * rates.step + masked * rates.masked for steps, masked in tile_schedules]
    whole = _handed_out(time for time in times for _ in range(some))
    return rates.launch + whole + (heads - some) * sum(times) / WORKERS[ARCH]


@lru_cache(maxsize=256)
def _forward_tile_schedules(plan: Plan, site: Site) -> tuple[tuple[int, int], ...]:
    """Lists (kv tiles, masked kv tiles) of all q tiles of a head, in launch order."""
    from ...schedule.tile_schedule import functions  # expressions, which need sympy

    assert plan.forward_tiles is not None
    _, q_len, kv_len = _sizes(site)
    rows, keys = plan.forward_tiles.block_q, plan.forward_tiles.block_kv
    problem = Problem(site.band, q_len, kv_len, rows, keys).resolved
    if site.band.lo is not None:  # the tile that is not full is the first one, and the last tile is handed out first
        missing = -q_len % rows
        lo, hi = (None if x is None else x + missing for x in (problem.band.lo, problem.band.hi))
        problem = replace(problem, band=Band(lo, hi), q_len=q_len + missing)
    kv_range, tail = functions("two_pass", problem).dash_kv_range, problem.tail()
    ranges = [kv_range(q, *tail) for q in reversed(range(problem.n_q))]
    return tuple((end - first, end - first - (full_end - full_first)) for first, full_first, full_end, end in ranges)
