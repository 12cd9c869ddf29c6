"""Simulates a plan's tile schedule on a small problem, for a timeline in the dump."""

from __future__ import annotations

from dataclasses import replace

from ...model.plan import Plan
from ...model.site import NOMINAL_LEN, Site
from ...timeline.model import Picture
from ...timeline.simulated import of_plan

TILES, HEADS, WORKERS = 8, 4, 8
"""The maximum numbers of tiles along each length, heads and workers; with more, they could not be distinguished."""


def picture(site: Site, arch: str, plan: Plan) -> Picture:
    """Returns a picture of the simulated timeline of a plan, with at most `HEADS` heads and `TILES` tiles per length.

    Raises:
        ArgumentError: an unknown architecture.
    """
    tile = max(plan.dkdv.block_q, plan.dkdv.block_kv)
    q_len, kv_len = (min(length or NOMINAL_LEN, TILES * tile) for length in (site.q_len, site.kv_len))
    kv_heads = min(site.kv_heads, max(1, HEADS // site.group))
    small = replace(site, batch=1, q_heads=kv_heads * site.group, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len)
    title = f"{plan.schedule} at {small.q_heads} heads, {q_len} queries, {kv_len} keys"
    subtitle = f"Simulated for {arch}, with {WORKERS} workers, in tiles of {tile}; the site may have more of each."
    return Picture(title, subtitle, (of_plan(small, arch, plan, workers=WORKERS),))
