"""NaN and infinities wherever nobody looks, through the operator: the Hopper kernel and the portable ones."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from dash_inductor.model import Band, Plan, Tiles
from dash_inductor.operators import attention as ops
from dash_inductor.schedule import supports
from dash_inductor.schedule.schedules import NAMES

from ..support import poison
from ..support.attention import Attention, Gradients, compiled_backward
from ..support.calls import backward_spec
from ..support.hopper import MARKS, plan_of
from ..support.hopper_builds import TILES

pytestmark = pytest.mark.gpu

# Lengths of several tiles, ragged and not; with the masks' own alignment every kind of row and key is there.
CASES = [
    (Band(), 200, 333),
    (Band(0), 300, 512),  # the last keys are seen by no row
    (Band(0, None, "bottom_right"), 512, 300),  # the first rows see no key
    (Band(0, 9), 640, 256),  # the last rows see no key
    (Band(None, -50), 256, 640),  # the first keys are seen by no row
    (Band(150, 400), 700, 256),  # rows at both ends
    (Band(-400, -150), 256, 700),  # keys at both ends
    (Band(0, 255), 1000, 1000),  # everybody takes part
    (Band(5000, 6000), 300, 200),  # nobody does
    (Band(-70), 8300, 200),  # long enough for tile schedules to be bent
]
SCHEDULES = [name for name in NAMES if name != "two_pass"]
_names = itertools.cycle(SCHEDULES)
_groups = itertools.cycle((1, 4, 2))


def schedule_for(mask: Band) -> str:
    return next(name for name in _names if supports(name, mask) is None)


HOPPER = [(dims, *case, schedule_for(case[0]), next(_groups)) for dims in TILES for case in CASES]
PORTABLE = [
    (schedule, *case, next(_groups)) for case in CASES for schedule in ("two_pass", poison.single_pass(case[0]))
]


def through_operator(plan: Plan) -> poison.Backward:
    """The eager operator, which runs the Hopper kernel for plans of it."""

    def backward(p: Attention, out: Tensor, lse: Tensor) -> Gradients:
        gradients: Gradients = ops.attention_backward(
            p.do, p.q, p.k, p.v, out, lse, [], str(backward_spec(p.mask, p.scale)), str(plan), "test"
        )
        return gradients

    return backward


def through_inductor(p: Attention, plan: Plan) -> poison.Backward:
    """The operator in a compiled graph, where it becomes the portable kernels."""
    compiled = compiled_backward(p.mask, p.scale, plan)
    return lambda other, out, lse: compiled(other.do, other.q, other.k, other.v, out, lse)


def portable(schedule: str) -> Plan:
    dq = Tiles(64, 64, 4, 2) if schedule == "two_pass" else None
    return Plan("portable", schedule, "keep", Tiles(64, 64, 4, 2), dq, head_chunk=4)


class TestHopper:
    pytestmark = MARKS

    @pytest.mark.parametrize(("dims", "mask", "q_len", "kv_len", "schedule", "group"), HOPPER, ids=str)
    def test_what_nobody_sees_may_hold_anything(
        self, dims: tuple[int, int], mask: Band, q_len: int, kv_len: int, schedule: str, group: int
    ) -> None:
        """One batch element of few heads: schedules that need co-residency run too."""
        p = Attention.random(
            q_len, kv_len, dims[0], mask, batch=1, kv_heads=2, group=group, value_dim=dims[1], dtype=torch.bfloat16
        )
        poison.check_poison(p, through_operator(plan_of(p, schedule)))

    @pytest.mark.parametrize("fill", [float("inf"), float("-inf"), float("nan"), 0.0])
    def test_log_sum_exp_of_rows_without_keys(self, fill: float) -> None:
        """Forwards disagree on it."""
        p = Attention.random(512, 300, 128, Band(0, None, "bottom_right"), batch=1)
        out, lse = p.rounded_forward()
        backward = through_operator(plan_of(p, "spt"))
        expected = backward(p, out, lse)
        rows, _ = poison.seen(p)
        other = torch.where(rows, lse, fill)
        assert [torch.equal(a, b) for a, b in zip(expected, backward(p, out, other), strict=True)] == [True] * 3


@pytest.mark.parametrize(("schedule", "mask", "q_len", "kv_len", "group"), PORTABLE, ids=str)
def test_what_nobody_sees_may_hold_anything(schedule: str, mask: Band, q_len: int, kv_len: int, group: int) -> None:
    p = Attention.random(q_len, kv_len, 64, mask, batch=1, group=group)
    poison.check_poison(p, through_inductor(p, portable(schedule)))


@pytest.mark.parametrize("schedule", ["two_pass", "spt"])
def test_overflow_behind_the_mask(schedule: str) -> None:
    p = Attention.random(333, 333, 64, Band(0), group=2)
    poison.check_overflow(p, through_inductor(p, portable(schedule)))
