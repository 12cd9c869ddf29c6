"""`EXECUTION` of the reference family: runs the reference executor in plain ATen and compiles nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...model.call import Call
from ...model.plan import Plan
from ...model.site import Site
from ..common.layouts import as_given, heads_first, in_orders
from ..execution import Execution, Gradients, Results, Run


def backward(tensors: Sequence[Tensor], extras: Sequence[Tensor], call: Call, plan: Plan, site: str) -> Run:
    from . import backward as reference

    def run(args: Sequence[Any]) -> Gradients:
        *operands, logsumexp, extras = args[:7]
        grad_out, query, key, value, out = heads_first(operands, call)
        given = grad_out, query, key, value, out, logsumexp
        makers = {
            "dbias": lambda: reference.bias_gradient(*given, extras, call, plan),
            "delta": lambda: reference.delta(grad_out, out, extras, call),
        }
        gradients = [as_given(each, call) for each in reference.backward(*given, extras, call, plan)]
        return [*gradients, *(makers[name]() for name in call.results[3:])]

    return in_orders(run, call)


def forward(tensors: Sequence[Tensor], extras: Sequence[Tensor], call: Call, plan: Plan, site: str) -> Run:
    from .forward import forward as reference

    tiles = plan.forward_tiles
    assert tiles is not None

    def run(args: Sequence[Any]) -> Results:
        *operands, extras = args[:4]
        query, key, value = heads_first(operands, call)
        out, logsumexp = reference(query, key, value, extras, call, tiles)
        return as_given(out, call), logsumexp

    return in_orders(run, call)


def _nothing(site: Site, plan: Plan, device: torch.device) -> Iterator[Any]:
    return iter(())


EXECUTION = Execution(backward, forward, _nothing, _nothing)
