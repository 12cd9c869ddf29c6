"""`EXECUTION` of the reference family, which compiles nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...model.call import Call
from ...model.plan import Plan, Tiles
from ...model.site import Site
from ..execution import Execution, Gradients, Results, Tensors


def backward(tensors: Tensors, extras: Sequence[Tensor], call: Call, plan: Plan, site: str) -> Gradients:
    from . import backward as reference

    makers = {
        "dbias": lambda: reference.bias_gradient(*tensors, extras, call, plan),
        "delta": lambda: reference.delta(tensors[0], tensors[4], extras, call),
    }
    gradients = reference.backward(*tensors, extras, call, plan)
    return [*gradients, *(makers[name]() for name in call.results[3:])]


def forward(query: Tensor, key: Tensor, value: Tensor, extras: Sequence[Tensor], call: Call, tiles: Tiles) -> Results:
    from .forward import forward

    return forward(query, key, value, extras, call, tiles)


def _nothing(site: Site, plan: Plan, device: torch.device) -> Iterator[Any]:
    return iter(())


EXECUTION = Execution(backward, forward, _nothing, _nothing)
