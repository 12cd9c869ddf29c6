"""The setting `schedule`: followed wherever the planner can, and where it cannot the record says so."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

import pytest

from dash_inductor.config import Schedule, config
from dash_inductor.errors import ArgumentError
from dash_inductor.model.mask import Band
from dash_inductor.model.plan import Plan
from dash_inductor.model.site import Site
from dash_inductor.planning import decide, nominal, plan, planner

from ...support.calls import spec_of
from ...support.graphs import BACKWARD, Shape, efficient, joint_graph, op_counts, rewritten

FORCED = [name for name in get_args(Schedule) if name != "auto"]
MASKS = [Band(), Band(0, None), Band(0, 300), Band(None, 300), Band(-5, None, "bottom_right")]
DIMS = [(64, 64), (128, 128), (192, 128), (256, 256)]


@pytest.fixture
def small_nominal_problem(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The fastest schedule does not matter here, so the problem that the planner simulates may be small."""
    monkeypatch.setattr(nominal, "NOMINAL_LEN", 512)
    planner._choose.cache_clear()
    yield
    planner._choose.cache_clear()


def site_of(mask: Band, dims: tuple[int, int]) -> Site:
    return Site("cuda", "bfloat16", 2, 8, 2, 1024, 1024, *dims, spec_of(mask, 0.125))


@pytest.mark.usefixtures("small_nominal_problem")
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_every_schedule_at_every_mask_and_head_dim(mask: Band, dims: tuple[int, int]) -> None:
    site = site_of(mask, dims)
    automatic, followed = plan(site, "sm_90"), []
    for name in FORCED:
        try:
            expected = plan(site, "sm_90", schedule=name)
        except ArgumentError as error:
            expected, reason = automatic, str(error)
        else:
            followed.append(name)
            reason = ""
        chosen = decide(site, "sm_90", name)
        assert isinstance(chosen, Plan)
        assert (chosen.schedule == name) == (name in followed or automatic.schedule == name)
        assert replace(chosen, schedule_note="") == expected
        assert chosen.schedule_note == (
            f"the setting schedule={name!r} cannot be followed here: {reason}" if reason else ""
        )
    assert {"ascending", "two_pass"} <= {*followed}
    assert ("shift" in followed) == mask.is_full


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(("name", "dims"), [*itertools.product(["shift", "two_pass"], [(64, 64), (256, 256)])])
def test_the_record_says_whether_the_setting_was_followed(name: str, dims: tuple[int, int]) -> None:
    module = joint_graph(efficient, Shape(head_dim=dims[0], value_dim=dims[1]), causal=True)
    with config.patch(schedule=name, strict=True):
        graph, record = rewritten(module)
    assert (record.status, op_counts(graph)[BACKWARD]) == ("replaced", 1)
    assert record.plan is not None
    followed = name == "two_pass"
    assert (record.plan.schedule == name) == followed
    assert (f"schedule={name!r} cannot be followed here: " in record.detail) is not followed
