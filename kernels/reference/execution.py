"""`EXECUTION` of the reference family: runs the reference executor in plain ATen and compiles nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...model.attention_spec import AttentionSpec
from ...model.plan import Plan
from ...model.site import Site
from ..common.layouts import as_given, heads_first, in_orders
from ..execution import Execution, Gradients, Results, Run


def backward(tensors: Sequence[Tensor], extras: Sequence[Tensor], spec: AttentionSpec, plan: Plan, site: str) -> Run:
    from . import backward as reference

    def run(args: Sequence[Any]) -> Gradients:
        *operands, logsumexp, extras = args[:7]
        grad_out, query, key, value, out = heads_first(operands, spec)
        given = grad_out, query, key, value, out, logsumexp
        makers = {
            "dbias": lambda: reference.bias_gradient(*given, extras, spec, plan),
            "delta": lambda: reference.delta(grad_out, out, extras, spec),
        }
        gradients = [as_given(each, spec) for each in reference.backward(*given, extras, spec, plan)]
        return [*gradients, *(makers[name]() for name in spec.results[3:])]

    return in_orders(run, spec)


def forward(tensors: Sequence[Tensor], extras: Sequence[Tensor], spec: AttentionSpec, plan: Plan, site: str) -> Run:
    from .forward import forward as reference

    tiles = plan.forward_tiles
    assert tiles is not None

    def run(args: Sequence[Any]) -> Results:
        *operands, extras = args[:4]
        query, key, value = heads_first(operands, spec)
        out, logsumexp = reference(query, key, value, extras, spec, tiles)
        return as_given(out, spec), logsumexp

    return in_orders(run, spec)


def _nothing(site: Site, plan: Plan, device: torch.device) -> Iterator[Any]:
    return iter(())


EXECUTION = Execution(backward, forward, _nothing, _nothing)
