"""The reference executor against fp64: every schedule, mask and shape class; and the forwards that run on the CPU."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from dash_inductor.errors import ArgumentError, DashError
from dash_inductor.model import Band, Plan, Tiles
from dash_inductor.operators import attention as ops
from dash_inductor.schedule import NAMES, supports

from ...support import poison
from ...support.attention import Attention, Gradients, errors
from ...support.calls import BSHD, backward_spec, forward_spec

MASKS = [Band(), Band(0), Band(0, None, "bottom_right"), Band(0, 20), Band(-9, 9), Band(3, 5)]
# fp32 against fp64: sums of at most 70 products of magnitude 1 to 10 lose a few units in the last place
TOLERANCE = 2e-5


def reference_plan(schedule: str, forward: str = "reference") -> Plan:
    dq = Tiles(32, 16, 1, 1) if schedule == "two_pass" else None
    own = Tiles(16, 32, 1, 1) if forward == "reference" else None
    return Plan("reference", schedule, forward, Tiles(16, 32, 1, 1), dq, forward_tiles=own)


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("q_len", "kv_len"), [(70, 70), (33, 70), (70, 33), (1, 40)])
def test_gradients(schedule: str, mask: Band, q_len: int, kv_len: int) -> None:
    if supports(schedule, mask) is not None:
        with pytest.raises(ArgumentError, match=schedule):
            Attention.random(q_len, kv_len, 16, mask, device="cpu", dtype=torch.float32).plan("cpu", schedule)
        return
    problem = Attention.random(q_len, kv_len, 16, mask, kv_heads=3, group=2, device="cpu", dtype=torch.float32)
    out, lse, exact = problem.exact()
    spec = str(backward_spec(mask, problem.scale, (BSHD, [0, 1, 2, 3], BSHD)))
    arguments = (problem.do, problem.q, problem.k, problem.v, out.float(), lse.float(), [], spec)
    plan = str(reference_plan(schedule))
    gradients = ops.attention_backward(*arguments, plan, "test")
    assert max(errors(gradients, exact)) < TOLERANCE
    dense = torch.empty_like(problem.k, memory_format=torch.contiguous_format)
    assert [g.stride() for g in gradients] == [problem.q.stride(), dense.stride(), problem.v.stride()]
    again = ops.attention_backward(*arguments, plan, "test")
    assert all(map(torch.equal, gradients, again))


@pytest.mark.parametrize("schedule", ["two_pass", "spt"])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(16, 24), (24, 8), (20, 20), (3, 5), (576, 512)])
def test_head_dims(schedule: str, head_dim: int, value_dim: int) -> None:
    """Any, of query and key and of value."""
    how = {"value_dim": value_dim, "group": 2, "device": "cpu", "dtype": torch.float32}
    problem = Attention.random(40, 33, head_dim, Band(0, 20), **how)  # type: ignore[arg-type]  # of all kinds
    out, lse, exact = problem.exact()
    spec = str(backward_spec(problem.mask, problem.scale, (BSHD, [0, 1, 2, 3], BSHD)))
    arguments = (problem.do, problem.q, problem.k, problem.v, out.float(), lse.float(), [], spec)
    gradients = ops.attention_backward(*arguments, str(reference_plan(schedule)), "test")
    assert max(errors(gradients, exact)) < TOLERANCE


@pytest.mark.parametrize(("mask", "q_len", "kv_len"), poison.MASKS, ids=str)
def test_what_nobody_sees_may_hold_anything(mask: Band, q_len: int, kv_len: int) -> None:
    for schedule in ("two_pass", poison.single_pass(mask)):
        p = Attention.random(q_len, kv_len, 16, mask, batch=1, group=2, device="cpu", dtype=torch.float32)
        poison.check_poison(p, executed(schedule))


@pytest.mark.parametrize("schedule", ["two_pass", "spt"])
def test_overflow_behind_the_mask(schedule: str) -> None:
    p = Attention.random(70, 70, 16, Band(0), group=2, device="cpu", dtype=torch.float32)
    poison.check_overflow(p, executed(schedule))


def executed(schedule: str) -> poison.Backward:
    """The executor through the operator."""

    def backward(p: Attention, out: torch.Tensor, lse: torch.Tensor) -> Gradients:
        arguments = p.do, p.q, p.k, p.v, out, lse, [], str(backward_spec(p.mask, p.scale))
        gradients: Gradients = ops.attention_backward(*arguments, str(reference_plan(schedule)), "test")
        return gradients

    return backward


def test_accumulation_order_changes_the_bits() -> None:
    """The executor really follows the plan: another order of the same sums has other bits."""
    problem = Attention.random(70, 256, 16, Band(), device="cpu", dtype=torch.float32)
    out, lse = problem.rounded_forward()
    arguments = (problem.do, problem.q, problem.k, problem.v, out, lse, [], str(backward_spec(Band(), problem.scale)))
    dq = {
        name: ops.attention_backward(*arguments, str(reference_plan(name)), "test")[0]
        for name in ("ascending", "spt", "descending")
    }
    assert not torch.equal(dq["ascending"], dq["spt"])
    assert torch.equal(dq["ascending"], dq["descending"])  # same ranks


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("q_len", "kv_len"), [(200, 200), (33, 150), (150, 33)])
def test_reference_forward(mask: Band, q_len: int, kv_len: int) -> None:
    problem = Attention.random(q_len, kv_len, 16, mask, group=2, device="cpu", dtype=torch.float32)
    out, lse, _ = problem.exact()
    plan = str(reference_plan("two_pass"))
    got, got_lse = ops.attention_forward(
        problem.q, problem.k, problem.v, [], str(forward_spec(mask, problem.scale)), plan, "test"
    )
    sees = lse.isfinite()
    assert (got - out).abs().max() < TOLERANCE
    assert (got_lse - lse)[sees].abs().max() < TOLERANCE
    assert (got[~sees] == 0).all()
    assert not got_lse[~sees].isfinite().any()


def test_forward_as_the_operator_gives_it() -> None:
    problem = Attention.random(96, 96, 16, Band(0), group=2, device="cpu", dtype=torch.float32)
    plan = str(reference_plan("two_pass"))
    out, lse = ops.attention_forward(
        problem.q, problem.k, problem.v, [], str(forward_spec(Band(0), problem.scale)), plan, "test"
    )
    k, v = (t.repeat_interleave(2, 1) for t in (problem.k, problem.v))
    expected = torch.nn.functional.scaled_dot_product_attention(problem.q, k, v, is_causal=True)
    torch.testing.assert_close(out, expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert out.stride() == problem.q.stride()
    assert lse.is_contiguous()
    assert lse.dtype == torch.float32


def test_a_plan_without_a_forward_of_ours_is_refused() -> None:
    q, spec = torch.randn(1, 1, 8, 16), str(forward_spec(Band(), 0.25))
    plans = {
        r"plan\.forward='keep' is not allowed": reference_plan("two_pass", "keep"),
        r"plan\.forward_tiles=None is not allowed": replace(reference_plan("two_pass"), forward_tiles=None),
    }
    for message, plan in plans.items():
        with pytest.raises(ArgumentError, match=message):
            ops.attention_forward(q, q, q, [], spec, str(plan), "test")


def test_a_plan_of_an_unknown_family_is_refused() -> None:
    q, spec, dims = (
        torch.randn(1, 1, 8, 16),
        str(backward_spec(Band(), 0.25)),
        "spt/dkdv=16x32w1s1/head_chunk=1/forward=keep",
    )
    with pytest.raises(ArgumentError, match=r"plan\.kernel='wheel' is not allowed: expected one of 'reference'"):
        ops.attention_backward(q, q, q, q, q, q[..., 0], [], spec, f"wheel/{dims}", "test")


def test_a_call_must_fit_the_operator() -> None:
    q, plan = torch.randn(1, 1, 8, 16), str(reference_plan("two_pass"))
    for spec, extras, message in (
        ("full/scale=0.25", [], "orders of 1 results"),
        ("full/scale=0.25/orders=0123,0123", [], "orders of 1 results"),
        ("full & keys(1)/scale=0.25/orders=0123", [q], "reads number 1"),
        ("full & full/scale=0.25/orders=0123", [], "at most one band"),
        ("round/scale=0.25/orders=0123", [], "'full', 'causal' or"),
        ("full/scale=x/orders=0123", [], "made by str"),
        ("full", [], "made by str"),
    ):
        with pytest.raises(ArgumentError, match=re.escape(message)):
            ops.attention_forward(q, q, q, extras, spec, plan, "test")


def test_operators_refuse_autograd() -> None:
    q = torch.randn(1, 1, 8, 16, requires_grad=True)
    out, _ = ops.attention_forward(
        q, q, q, [], str(forward_spec(Band(), 0.25)), str(reference_plan("two_pass")), "test"
    )
    with pytest.raises(DashError, match="autograd cannot differentiate"):
        out.sum().backward()


def test_layout_must_be_a_permutation() -> None:
    q = torch.randn(1, 1, 8, 16)
    with pytest.raises(ArgumentError, match="permutations of 0, 1, 2, 3"):
        ops.attention_forward(q, q, q, [], "full/scale=0.25/orders=0012", str(reference_plan("two_pass")), "test")


def test_flops_are_counted_like_pytorchs() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    problem = Attention.random(32, 48, 16, Band(), group=2, device="cpu", dtype=torch.float32)
    out, lse = problem.rounded_forward()
    plan = str(reference_plan("two_pass"))
    with FlopCounterMode(display=False) as counted:
        ops.attention_forward(problem.q, problem.k, problem.v, [], str(forward_spec(Band(), 1.0)), plan, "test")
    assert counted.get_total_flops() == 2 * 2 * 2 * 4 * 32 * 48 * 16  # two matmuls, two flops each
    with FlopCounterMode(display=False) as counted:
        ops.attention_backward(
            problem.do, problem.q, problem.k, problem.v, out, lse, [], str(backward_spec(Band(), 1.0)), plan, "test"
        )
    assert counted.get_total_flops() == 5 * 2 * 2 * 4 * 32 * 48 * 16
