"""Predicted times of plans at sites, in microseconds.

A launch is a list of walks, one for each ticket, which `costs.WORKERS` CTAs take in launch order as they become free.
A walk takes its steps and a constant (`calibration`).  Turns are not simulated: walks that go up never wait long, and
what walks that go down wait is part of their constant.  Everything else has no prediction: the chain of waits of
`descending` and of `ascending` under a causal mask, of schedules whose CTAs must be co-resident, and kernels that have
not been timed.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from ..errors import ArgumentError
from ..model.mask import Band
from ..model.plan import Plan
from ..model.site import Site
from ..schedule.problem import Problem
from . import costs
from .calibration import CALIBRATIONS, DATA, Backward, Calibration, Forward
from .families import HOPPER, hopper_dims
from .planner import likely_band

GPU = "H200"
"""The GPU for which predictions are made unless another one is named.  Those for sm_90 are made for it on an H100 too,
where nothing has been measured.
"""

Documents = tuple[int, ...]
"""Lengths of packed documents, one after the other."""

WALKS = 16384
"""Launches of more walks are predicted for fewer batch elements, and the others' work is added."""


def predicted_us(plan: Plan, site: Site, arch: str, gpu: str = GPU, documents: Documents | None = None) -> float | None:
    """Predicted time of the backward that `plan` runs at `site`, in microseconds, from saved tensors to gradients.

    Dynamic lengths and batches count as the planner's nominal ones.  Valid keys and a dense mask are supposed to hide
    nothing, but for a dense mask that comes without a band, which is supposed to be causal.

    Args:
        arch: as for `planner.plan`.
        gpu: a GPU of this architecture that has been measured, a key of `CALIBRATIONS`.
        documents: where the mask has segments, the lengths of the documents in a batch element, which is the same for
            all; the predicted time is None without them.

    Returns:
        None where nothing is known; `unknown` says why.

    Raises:
        ArgumentError: a GPU that has not been measured, or documents that are not those of the site.
    """
    if unknown(plan, site, arch, gpu, documents) is not None:
        return None
    return backward_us(plan, site, _calibration(gpu), documents)


def predicted_forward_us(plan: Plan, site: Site, arch: str, gpu: str = GPU) -> float | None:
    """`predicted_us` for the forward."""
    dims = hopper_dims(site.head_dim, site.value_dim)
    rates = None if dims is None else _calibration(gpu).forward.get((*dims, site.band.is_window))
    if (
        arch != "sm_90"
        or plan.forward != HOPPER.name
        or rates is None
        or site.call.data
        or not _is_calibrated(site.band)
    ):
        return None
    return forward_us(plan, site, rates)


def unknown(plan: Plan, site: Site, arch: str, gpu: str = GPU, documents: Documents | None = None) -> str | None:
    """Why there is no prediction of the backward, in words; None where there is one.  Arguments as `predicted_us`."""
    if documents is not None:
        _check_documents(site, documents)
    dims = hopper_dims(site.head_dim, site.value_dim)
    if arch != "sm_90":
        return f"{arch} is not calibrated"
    if plan.kernel != HOPPER.name:
        return f"the {plan.kernel} kernels are not calibrated"
    if dims not in _calibration(gpu).backward:
        return f"head dims {site.head_dim} and {site.value_dim} are not calibrated on an {gpu}"
    if site.mask.segments is not None and documents is None:
        return "the time depends on the documents, which are data"
    if site.call.data and (dims != (128, 128) or not site.call.data <= {"segments", *DATA}):
        return f"{', '.join(sorted(site.call.data))} at head dims {site.head_dim} and {site.value_dim}: not calibrated"
    if not _is_calibrated(_walked(site)):
        return f"the mask {site.band} is not calibrated"
    if plan.schedule in ("shift", "symmetric_shift"):
        return f"{plan.schedule} is not calibrated"
    if _walked(site).is_full:
        return "bent_fold is not calibrated under a full mask" if plan.schedule == "bent_fold" else None
    if _all_at_once(problem_of(plan, site)):
        return None if plan.schedule == "bent_fold" else f"{plan.schedule} is not calibrated where all CTAs run at once"
    if plan.schedule in ("ascending", "descending"):
        return f"CTAs of {plan.schedule} wait for one another under this mask, which is not calibrated"
    return None


def _calibration(gpu: str) -> Calibration:
    if gpu not in CALIBRATIONS:
        raise ArgumentError("gpu", gpu, CALIBRATIONS)
    return CALIBRATIONS[gpu]


def _check_documents(site: Site, documents: Documents) -> None:
    if site.mask.segments is None:
        raise ArgumentError("documents", documents, "None for a mask without segments")
    if min(documents, default=0) < 1:
        raise ArgumentError("documents", documents, "one length at least, and none below 1")
    for name, length in (("q_len", site.q_len), ("kv_len", site.kv_len)):
        if length is not None and length != sum(documents):
            raise ArgumentError("documents", documents, f"lengths whose sum is {name}={length}")


def _walked(site: Site) -> Band:
    """The band whose tile pairs are supposed to be visible."""
    likely = likely_band(site)
    return site.band if likely is None else likely


def _is_calibrated(band: Band) -> bool:
    """Whether masks like this one have been measured: full ones, causal ones and windows of past tokens."""
    return band.is_full or band.lo == 0


def problem_of(plan: Plan, site: Site) -> Problem:
    """The backward of a site as the schedules of the Hopper kernels see it."""
    batch, q_len, kv_len = _sizes(site)
    tiles = plan.dkdv
    return Problem(
        _walked(site), q_len, kv_len, tiles.block_q, tiles.block_kv, batch, site.q_heads, section=plan.section
    )  # fmt: skip


def _sizes(site: Site) -> tuple[int, int, int]:
    """Batch, q_len and kv_len, nominal where they are dynamic."""
    nominal = costs.NOMINAL_BATCH, costs.NOMINAL_LEN, costs.NOMINAL_LEN
    found = site.batch, site.q_len, site.kv_len
    batch, q_len, kv_len = (n if x is None else x for x, n in zip(found, nominal, strict=True))
    return batch, q_len, kv_len


def _all_at_once(problem: Problem) -> bool:
    return problem.batch * problem.heads * problem.n_kv <= costs.WORKERS["sm_90"]


def backward_us(plan: Plan, site: Site, calibration: Calibration, documents: Documents | None = None) -> float:
    """Time of the backward of a site that is calibrated, in microseconds."""
    dims = hopper_dims(site.head_dim, site.value_dim)
    assert dims is not None
    problem, rates = problem_of(plan, site), calibration.backward[dims]
    if documents is not None:
        problem = replace(problem, q_len=sum(documents), kv_len=sum(documents))
    main, idle = _main(plan.schedule, problem, rates, site.group > 1, documents)
    elements = problem.batch * site.q_heads * problem.q_len * site.head_dim / 2**25
    after = max(calibration.after * elements - idle, 0.0)
    plain = calibration.launch + calibration.before * elements + main + after
    return plain * math.prod(DATA[kind] for kind in site.call.data - {"segments"})


def _main(
    name: str, problem: Problem, rates: Backward, grouped: bool, documents: Documents | None
) -> tuple[float, float]:
    """Time of the main kernel, and how long an SM has no walks left in it, on average."""
    tickets = problem.heads * problem.n_kv
    batch = max(1, min(problem.batch, WALKS // tickets))
    walks = _walks(name, replace(problem, batch=batch), documents)
    always = rates.walk + (rates.group if grouped else 0.0)
    times = {w: always + w[0] * rates.step + w[1] * rates.masked + w[2] * rates.down for w in set(walks)}
    whole = _handed_out(times[w] for w in walks)
    mean = sum(times[w] for w in walks) / costs.WORKERS["sm_90"]
    return whole + (problem.batch - batch) / batch * mean, whole - mean


@lru_cache(maxsize=256)
def _walks(name: str, problem: Problem, documents: Documents | None) -> tuple[tuple[int, int, bool], ...]:
    """For all walks in launch order: tile pairs, those of them that the mask cuts, and whether it begins at its last q
    tile, where the mask lets the others of its head begin too.
    """
    from ..schedule.walk import ClosedForm  # expressions, which need sympy

    walk = ClosedForm(name, problem)
    tiles = _tiles(name, problem) if documents is None else _tiles_of(documents, problem)
    found: dict[tuple[int, int], tuple[int, int, bool]] = {}
    walks = []
    for ticket in range(walk.tickets):
        head, slot = walk.launch(ticket)
        key = walk.kind(head), slot
        if key not in found:
            kv = walk.kv_tile(head, slot, 0)
            assert kv is not None
            steps = walk.visits(head, kv)
            down = not problem.band.is_full and steps > 1 and walk.q_tile(head, kv, 0) > walk.q_tile(head, kv, 1)
            found[key] = *tiles[kv], down
        walks.append(found[key])
    return tuple(walks)


def _tiles(name: str, problem: Problem) -> list[tuple[int, int]]:
    """For each kv tile: its tile pairs, and those of them that the mask cuts."""
    from ..schedule.walk import functions

    ranges = [functions(name, problem).dash_q_range(kv, *problem.tail()) for kv in range(problem.n_kv)]
    return [(end - first, end - first - (full_end - full_first)) for first, full_first, full_end, end in ranges]


def _tiles_of(documents: Documents, problem: Problem) -> list[tuple[int, int]]:
    """`_tiles` where tokens see those of their own document alone."""
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
    """When the last of these is done, each given to the worker that is free first."""
    free = [0.0] * costs.WORKERS["sm_90"]
    for time in times:
        heapq.heapreplace(free, free[0] + time)
    return max(free)


def forward_us(plan: Plan, site: Site, rates: Forward) -> float:
    """Time of the forward of a site that is calibrated, in microseconds."""
    batch, _, _ = _sizes(site)
    heads = batch * site.q_heads
    walks = _forward_walks(plan, site)
    some = max(1, min(heads, WALKS // len(walks)))
    times = [rates.tile + steps * rates.step + masked * rates.masked for steps, masked in walks]
    whole = _handed_out(time for time in times for _ in range(some))
    return rates.launch + whole + (heads - some) * sum(times) / costs.WORKERS["sm_90"]


@lru_cache(maxsize=256)
def _forward_walks(plan: Plan, site: Site) -> tuple[tuple[int, int], ...]:
    """For all tiles of a head, in launch order: kv tiles, and those of them that the mask cuts."""
    from ..schedule.walk import functions  # expressions, which need sympy

    assert plan.forward_tiles is not None
    _, q_len, kv_len = _sizes(site)
    rows, keys = plan.forward_tiles.block_q, plan.forward_tiles.block_kv
    problem = Problem(site.band, q_len, kv_len, rows, keys).resolved
    if site.band.lo is not None:  # the tile that is not full is the first one, and the last tile is handed out first
        missing = -q_len % rows
        lo, hi = (None if x is None else x + missing for x in (problem.band.lo, problem.band.hi))
        problem = replace(problem, band=Band(lo, hi), q_len=q_len + missing)
    ranges = [functions("two_pass", problem).dash_kv_range(q, *problem.tail()) for q in reversed(range(problem.n_q))]
    return tuple((end - first, end - first - (full_end - full_first)) for first, full_first, full_end, end in ranges)
