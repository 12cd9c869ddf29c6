"""The bits of a head in the reference executor, whichever heads stand beside it: alone, at any place, split over ranks.

The orders are the portable kernels' under the planner's plan for the CPU, and the Hopper kernels' under theirs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dash_inductor.kernels.reference import backward as reference
from dash_inductor.kernels.reference import forward as reference_forward
from dash_inductor.model import Band, Plan
from dash_inductor.planning import plan
from dash_inductor.schedule.jobs import Job
from dash_inductor.schedule.problem import Problem
from dash_inductor.schedule.schedules import LEAST

from ...support.cases import some
from ...support.keyed import KeyedAttention

Results = tuple[Tensor, ...]
"""out, log-sum-exp, dq, dk and dv: [batch, heads, ...]."""


@dataclass(frozen=True)
class Case:
    """The architecture of the kernels, a mask, lengths, which keys are valid, and what is planned for it."""

    arch: str
    mask: Band
    q_len: int
    kv_len: int
    schedule: str
    valid: str = "all"

    def __str__(self) -> str:
        return f"{self.arch} {self.mask} {self.q_len}x{self.kv_len} {self.valid} {self.schedule}"

    def problem(self, kv_heads: int, group: int) -> KeyedAttention:
        lengths = self.q_len, self.kv_len
        return KeyedAttention.random(
            *lengths, self.mask, dims=(16, 16), batch=1, kv_heads=kv_heads, group=group, valid=self.valid
        )

    def plan(self, p: KeyedAttention) -> Plan:
        """The planner's, for tensors of this shape: in fp32 on the CPU, or in bf16 and with heads of 128 on a GPU."""
        cuda = replace(p.site(), dtype="bfloat16", head_dim=128, value_dim=128)
        found = plan(replace(p.site(), device="cpu") if self.arch == "cpu" else cuda, self.arch)
        assert (found.kernel, found.schedule) == ("reference" if self.arch == "cpu" else "hopper", self.schedule)
        return found

    def run(self, p: KeyedAttention) -> Results:
        """Forward and backward under the plan that the planner makes for a call with these heads."""
        made = self.plan(p)
        assert made.forward_tiles is not None
        out, lse = reference_forward.forward(p.q, p.k, p.v, p.extras, p.spec(1), made.forward_tiles)
        return out, lse, *reference.backward(p.do, p.q, p.k, p.v, out, lse, p.extras, p.spec(3), made)


CASES = [
    Case("cpu", Band(0), 100, 100, "two_pass"),
    Case("cpu", Band(), 70, 130, "two_pass", "holes"),
    Case("cpu", Band(0, 40), 130, 130, "two_pass", "left"),
    Case("sm_90", Band(0), 200, 300, "bent_fold"),
    Case("sm_90", Band(0), 64 * LEAST, 300, "bent_fold"),  # long enough for tile schedules to be bent
    Case("sm_90", Band(-70), 64 * LEAST, 200, "bent_fold", "padded"),
    Case("sm_90", Band(), 200, 300, "ascending"),
    Case("sm_90", Band(), 200, 300, "ascending", "holes"),
    Case("sm_90", Band(0, 511), 800, 800, "spt"),
    Case("sm_90", Band(0), 300, 300, "bent_fold", "left"),
]
cases = some(CASES, [CASES[1], CASES[2], CASES[5], CASES[7], CASES[8]])


def of_heads(p: KeyedAttention, kv_heads: Sequence[int]) -> KeyedAttention:
    """The problem with some of its kv heads, in this order, and their query heads."""
    keys, queries = list(kv_heads), query_heads(p, kv_heads)
    return replace(p, q=p.q[:, queries], k=p.k[:, keys], v=p.v[:, keys], do=p.do[:, queries])


def query_heads(p: KeyedAttention, kv_heads: Sequence[int]) -> list[int]:
    return [h * p.group + member for h in kv_heads for member in range(p.group)]


def of_results(p: KeyedAttention, results: Results, kv_heads: Sequence[int]) -> Results:
    queries, (out, lse, dq, dk, dv) = query_heads(p, kv_heads), results
    return out[:, queries], lse[:, queries], dq[:, queries], dk[:, kv_heads], dv[:, kv_heads]


def same(a: Results, b: Results) -> list[bool]:
    return [torch.equal(x, y) for x, y in zip(a, b, strict=True)]


@cases
def test_a_head_alone_and_at_every_place(case: Case) -> None:
    """Every one of 16 heads alone and at all 16 places, and the heads in turn at the places of 2 to 15.

    Problems that take long are run at fewer places.
    """
    p = case.problem(16, 1)
    whole = case.run(p)
    long = case.q_len >= 800
    for count in (1, 2, 5, 16) if long else range(1, 17):
        for first in range(0, 16, 1 if count == 1 or (count == 16 and not long) else 6):
            heads = [(first + i * (1 if count == 16 else 7)) % 16 for i in range(count)]
            assert same(case.run(of_heads(p, heads)), of_results(p, whole, heads)) == [True] * 5, heads


@pytest.mark.parametrize("group", [2, pytest.param(4, marks=pytest.mark.full)])
@cases
def test_groups_split_over_ranks(case: Case, group: int) -> None:
    """The kv heads with their query heads in equal shares, as tensor parallelism deals them out."""
    p = case.problem(4, group)
    whole = case.run(p)
    for ranks in (2, 4):
        for rank in range(ranks):
            heads = list(range(rank * 4 // ranks, (rank + 1) * 4 // ranks))
            found = case.run(of_heads(p, heads))
            assert same(found, of_results(p, whole, heads)) == [True] * 5, (rank, ranks)


def test_other_heads_are_noticed() -> None:
    """Negative control: every head has bits of its own, and so has a group one of whose query heads is missing."""
    case = CASES[3]
    p = case.problem(4, 2)
    whole = case.run(p)
    for a, b in itertools.permutations(range(4), 2):
        assert same(of_results(p, whole, [a]), of_results(p, whole, [b])) == [False] * 5
    fewer = replace(p, q=p.q[:, ::2], do=p.do[:, ::2])
    out, lse, dq, dk, dv = case.run(fewer)
    assert same((out, lse, dq), tuple(t[:, ::2] for t in whole[:3])) == [True] * 3
    assert same((dk, dv), whole[3:]) == [False] * 2


def test_a_schedule_that_knows_the_heads_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: tile schedules of the last head among several go down."""
    case = CASES[6]
    p = case.problem(3, 1)
    jobs = reference.tables

    def mirrored(name: str, problem: Problem) -> tuple[Job, ...]:
        found, last = jobs(name, problem), problem.heads - 1
        others = {job.work_id: job for job in jobs("descending", problem)}
        return tuple(others[job.work_id] if job.head == last > 0 else job for job in found)

    monkeypatch.setattr(reference, "tables", mirrored)
    whole = case.run(p)
    alone = [same(case.run(of_heads(p, [h])), of_results(p, whole, [h])) for h in range(3)]
    assert alone == [[True] * 5, [True] * 5, [True, True, True, False, False]]
