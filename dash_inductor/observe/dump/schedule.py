"""The picture of the schedule that a plan has."""

from __future__ import annotations

from ...model.mask import Band
from ...model.plan import Plan
from ...model.site import Site
from ...planning import costs
from ...schedule import timeline
from ...schedule.jobs import tables
from ...schedule.simulator import Costs, simulate
from ...schedule.walk import Problem

TILES, HEADS, WORKERS = 8, 4, 8
"""The picture shows this many kv tiles at most, heads and workers: more could not be told apart."""


def svg(site: Site, plan: Plan) -> str:
    """Workers over time, on a problem of `HEADS` heads with tiles like those of the plan."""
    tiles = plan.dkdv
    kv_len = min(site.kv_len or costs.NOMINAL_LEN, TILES * tiles.block_kv)
    q_len = min(site.q_len or costs.NOMINAL_LEN, TILES * max(tiles.block_q, tiles.block_kv))
    band = Band(site.band.lo, site.band.hi, site.band.anchor)
    problem = Problem(band, q_len, kv_len, tiles.block_q, tiles.block_kv, 1, HEADS, section=min(HEADS, plan.section))
    adding = Costs() if plan.dq is not None else Costs(1.0, 0.3, 0.3, depth=2)
    return timeline.svg(simulate(tables(plan.schedule, problem), WORKERS, adding))
