"""The Hopper kernel called directly, under a schedule of the test's choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dash_inductor.model import Plan

from . import hopper_calls
from .attention import Attention, Gradients
from .calls import BSHD, backward_spec
from .hopper_builds import TILES

_elsewhere = torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0)
MARKS = [pytest.mark.gpu, pytest.mark.skipif(_elsewhere, reason="a kernel for sm_90")]


def plan_of(problem: Attention, schedule: str, head_chunk: int = 4) -> Plan:
    """A plan of the Hopper kernel with the tiles of the problem's head dims."""
    tiles = TILES[problem.q.shape[3], problem.v.shape[3]]
    return Plan("hopper", schedule, "keep", tiles, head_chunk=head_chunk)


def any_forward(problem: Attention) -> tuple[Tensor, Tensor]:
    """An out and a log-sum-exp of no forward, where only bits, memory or progress matter."""
    out = problem.do
    return out, torch.full(out.shape[:3], 12.0, device=out.device)


class Direct:
    """One problem with its forward and a plan; calling it runs the kernel and returns the gradients.

    Args:
        forward: out and log-sum-exp, if the exact ones are not wanted.
    """

    def __init__(
        self, problem: Attention, schedule: str, *, head_chunk: int = 4, orders: Sequence[Sequence[int]] = (BSHD,) * 3,
        forward: tuple[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.problem, self.orders = problem, orders
        self.plan = plan_of(problem, schedule, head_chunk)
        self.forward = forward or problem.rounded_forward()

    def __call__(self) -> Gradients:
        p = self.problem
        return self.on(p.do, p.q, p.k, p.v, *self.forward)

    def on(self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """The gradients of other tensors with this mask, scale and plan."""
        p = self.problem
        return hopper_calls.backward(do, q, k, v, out, lse, backward_spec(p.mask, p.scale, self.orders), self.plan)

    def with_problem(self, **tensors: Tensor) -> Gradients:
        """The gradients with some of the problem's tensors given another layout."""
        p = dataclasses.replace(self.problem, **tensors)
        return self.on(p.do, p.q, p.k, p.v, *self.forward)
