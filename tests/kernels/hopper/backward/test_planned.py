"""Everything that the planner can choose for sm_90 compiles, where no GPU is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dash_inductor.kernels.hopper.backward import build
from dash_inductor.model import Band, Site
from dash_inductor.model.site import DType
from dash_inductor.planning import plan

from ....support.calls import spec_of
from ....support.hopper_builds import TILES

MASKS = [Band(), Band(0), Band(0, 1023), Band(None, 0)]


def problems() -> list[build.Specialisation]:
    """One problem per (padded head dims, schedule, bounds, tiles) among the plans of many sites."""
    found: dict[object, build.Specialisation] = {}
    dtypes: Iterator[DType] = itertools.cycle(("bfloat16", "float16"))
    groups, lengths = itertools.cycle((1, 4)), itertools.cycle((4096, 1000, None))
    for (head_dim, value_dim), mask in itertools.product(TILES, MASKS):
        group, length = next(groups), next(lengths)
        site = Site(
            "cuda", next(dtypes), 2, 2 * group, 2, length, length, head_dim, value_dim, spec_of(mask, 0.125)
        )  # fmt: skip
        chosen = plan(site, "sm_90")
        if chosen.kernel != "hopper":  # two passes are predicted faster
            continue
        problem = build.Specialisation.of_site(replace(site, kv_len=length or 1000), chosen)
        key = build.tile_dims(head_dim, value_dim), problem.schedule, problem.traits.bounds, problem.tiles
        found.setdefault(key, problem)
    return list(found.values())


def test_every_pair_of_head_dims_is_planned() -> None:
    planned = {(p.head_dim, p.value_dim, p.traits.has_lo) for p in problems() if not p.traits.has_hi}
    variants = {(*build.tile_dims(q, v), lo) for q, v, lo in planned}
    assert variants == {(*dims, lo) for dims in build.BACKWARD_CONFIGS for lo in (False, True)}


@pytest.mark.parametrize(
    "problem",
    [pytest.param(p, id=str(p), marks=[pytest.mark.full] if i % 3 else []) for i, p in enumerate(problems())],
)
def test_planned_kernels_compile(problem: build.Specialisation) -> None:
    """A third of them in every run; the budgets have every pair of head dims and every schedule."""
    kernels = build.Kernels(problem)
    assert kernels.main.metadata.shared <= 227 << 10
    assert kernels.prepare.asm["cubin"]
    assert kernels.finish.asm["cubin"]
