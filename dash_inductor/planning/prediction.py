"""Predicted times of plans at sites, in microseconds.

A launch is a list of CTAs, handed out in launch order to `costs.WORKERS` workers as they become free.  A CTA takes its
steps and a constant (`calibration`).  Turns are not simulated: walks that go up never wait long, and what walks that go
down wait is part of their constant.  Everything else has no prediction: the chain of waits of `descending` and of
`ascending` under a causal mask, of schedules whose CTAs must be co-resident, and kernels that have not been timed.
"""

from __future__ import annotations

import heapq
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
from .calibration import ALONE, CALIBRATIONS, DATA, Backward, Calibration, Forward
from .families import HOPPER, hopper_dims
from .planner import likely_band

GPU = "H200"
"""The GPU for which predictions are made unless another one is named."""

CTAS = 32768
"""Launches of more CTAs are predicted for fewer batch elements, and the others' work is added."""


def predicted_us(plan: Plan, site: Site, arch: str, gpu: str = GPU) -> float | None:
    """Predicted time of the backward that `plan` runs at `site`, in microseconds, from saved tensors to gradients.

    Dynamic lengths and batches count as the planner's nominal ones.  Valid keys and a dense mask are supposed to hide
    nothing, but for a dense mask that comes without a band, which is supposed to be causal.

    Args:
        arch: as for `planner.plan`.
        gpu: a GPU of this architecture that has been measured, a key of `CALIBRATIONS`.

    Returns:
        None where nothing is known; `unknown` says why.

    Raises:
        ArgumentError: a GPU that has not been measured.
    """
    if unknown(plan, site, arch, gpu) is not None:
        return None
    return backward_us(plan, site, _calibration(gpu))


def predicted_forward_us(plan: Plan, site: Site, arch: str, gpu: str = GPU) -> float | None:
    """`predicted_us` for the forward."""
    dims = hopper_dims(site.head_dim, site.value_dim)
    rates = None if dims is None else _calibration(gpu).forward.get((*dims, is_window(site)))
    if (
        arch != "sm_90"
        or plan.forward != HOPPER.name
        or rates is None
        or site.call.data
        or not _is_calibrated(site.band)
    ):
        return None
    return forward_us(plan, site, rates)


def unknown(plan: Plan, site: Site, arch: str, gpu: str = GPU) -> str | None:
    """Why there is no prediction of the backward, in words; None where there is one."""
    dims = hopper_dims(site.head_dim, site.value_dim)
    if arch != "sm_90":
        return f"{arch} is not calibrated"
    if plan.kernel != HOPPER.name:
        return f"the {plan.kernel} kernels are not calibrated"
    if dims not in _calibration(gpu).backward:
        return f"head dims {site.head_dim} and {site.value_dim} are not calibrated on an {gpu}"
    if "segments" in site.call.data:
        return "the time depends on the documents, which are data"
    if site.call.data and (dims != (128, 128) or not site.call.data <= DATA.keys()):
        return f"{', '.join(sorted(site.call.data))} at head dims {site.head_dim} and {site.value_dim}: not calibrated"
    if not _is_calibrated(_walked(site)):
        return f"the mask {site.band} is not calibrated"
    if plan.schedule in ("shift", "symmetric_shift"):
        return f"{plan.schedule} is not calibrated"
    if _walked(site).is_full:
        return "bent_fold is not calibrated under a full mask" if plan.schedule == "bent_fold" else None
    if _all_at_once(problem_of(plan, site)):
        return None if plan.schedule in ALONE else f"{plan.schedule} is not calibrated where all CTAs run at once"
    if plan.schedule in ("ascending", "descending"):
        return f"CTAs of {plan.schedule} wait for one another under this mask, which is not calibrated"
    return None


def _calibration(gpu: str) -> Calibration:
    if gpu not in CALIBRATIONS:
        raise ArgumentError("gpu", gpu, CALIBRATIONS)
    return CALIBRATIONS[gpu]


def is_window(site: Site) -> bool:
    """Whether the mask of a site has two bounds."""
    return site.band.lo is not None and site.band.hi is not None


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


def backward_us(plan: Plan, site: Site, calibration: Calibration) -> float:
    """Time of the backward of a site that is calibrated, in microseconds."""
    dims = hopper_dims(site.head_dim, site.value_dim)
    assert dims is not None
    problem, rates = problem_of(plan, site), calibration.backward[dims]
    main = _main(plan.schedule, problem, rates, site.group > 1)
    if not problem.band.is_full and _all_at_once(problem):
        main *= ALONE[plan.schedule]
    elements = problem.batch * site.q_heads * problem.q_len * site.head_dim
    plain = main + calibration.around * elements / 2**25 + calibration.launch
    return plain * math.prod(DATA[kind] for kind in site.call.data)


def _main(name: str, problem: Problem, rates: Backward, grouped: bool) -> float:
    """Time of the main kernel."""
    tickets = problem.heads * problem.n_kv
    batch = max(1, min(problem.batch, CTAS // tickets))
    walks = _walks(name, replace(problem, batch=batch))
    step = rates.step * (rates.bent if name == "bent_fold" else 1.0)
    always = rates.cta + (rates.group if grouped else 0.0)
    times = {w: always + w[0] * step + w[1] * rates.masked + w[2] * rates.down for w in set(walks)}
    whole = _handed_out(times[w] for w in walks)
    rest = (problem.batch - batch) / batch * sum(times[w] for w in walks) / costs.WORKERS["sm_90"]
    return whole + rest


@lru_cache(maxsize=256)
def _walks(name: str, problem: Problem) -> tuple[tuple[int, int, bool], ...]:
    """For all CTAs in launch order: tile pairs, those of them that the mask cuts, and whether it begins at its last q
    tile, where the mask lets the others of its head begin too.
    """
    from ..schedule.walk import ClosedForm, functions  # expressions, which need sympy

    walk, tail = ClosedForm(name, problem), problem.tail()
    ranges = [functions(name, problem).dash_q_range(kv, *tail) for kv in range(problem.n_kv)]
    found: dict[tuple[int, int], tuple[int, int, bool]] = {}
    walks = []
    for ticket in range(walk.tickets):
        head, slot = walk.launch(ticket)
        key = walk.kind(head), slot
        if key not in found:
            kv = walk.kv_tile(head, slot, 0)
            assert kv is not None
            first, full_first, full_end, end = ranges[kv]
            steps = end - first
            down = steps > 1 and not problem.band.is_full and walk.q_tile(head, kv, 0) == end - 1
            found[key] = steps, steps - (full_end - full_first), down
        walks.append(found[key])
    return tuple(walks)


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
    some = max(1, min(heads, CTAS // len(walks)))
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
