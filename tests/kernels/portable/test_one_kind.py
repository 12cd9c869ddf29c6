"""Kernels with loads ahead have one kind of matmul: Note [One kind of matmul] of the family."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dash_inductor.kernels.portable import standalone
from dash_inductor.model import AttentionSpec, Band, Bias, Keys, Mask, Operand, Plan, Site, Tiles

from ...support.portable_builds import stages
from ...support.portable_plans import portable_plan

SPEC = AttentionSpec(Mask(Band(), keys=Keys(Operand(0))), 0.1, bias=Bias(Operand(1), True))


def kinds(plan: Plan, site: Site) -> list[tuple[str, set[str]]]:
    """The tiles and the kinds of matmuls of each kernel of the backward, by Triton's intermediate code."""
    found = []
    for kernel in standalone.render(plan, site):
        text = stages(kernel, "sm_90", "ttgir")["ttgir"]
        found.append((str(kernel.tiles), {kind for kind in ("ttng.warp_group_dot ", "tt.dot ") if f"= {kind}" in text}))
    return found


def site(head_dim: int) -> Site:
    return Site("cuda", "float16", 2, 2, 2, 130, 190, head_dim, head_dim, SPEC)


@pytest.mark.parametrize(("head_dim", "schedule"), [(128, "two_pass"), (192, "two_pass"), (192, "spt")])
def test_of_a_plan(head_dim: int, schedule: str) -> None:
    for tiles, found in kinds(portable_plan(site(head_dim), "sm_90", schedule), site(head_dim)):
        assert len(found) < 2 or tiles.endswith("s1"), tiles


def test_other_tiles_have_both() -> None:
    plan = replace(portable_plan(site(192), "sm_90", "two_pass"), dkdv=Tiles.parse("32x64w8s2"))
    assert {len(found) for tiles, found in kinds(plan, site(192)) if tiles == "32x64w8s2"} == {2}
