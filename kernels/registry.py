"""Runs a plan: looks up the family by the name in the plan and calls its kernels, outside of Inductor."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import ArgumentError
from ..model.call import Call
from ..model.plan import Plan
from .execution import Execution, Gradients, ReadyBackward, ReadyForward, Results, Tensors
from .families import FAMILIES, family


def execution(name: str, argument: str = "family") -> Execution:
    """Returns the `Execution` of the family with this name, a `Plan.kernel` or a `Plan.forward`.

    Raises:
        ArgumentError: no family has this name; the error names `argument`.
    """
    return family(name, argument).execution


def backward(tensors: Tensors, extras: Sequence[Tensor], call: Call, plan: Plan, site: str) -> Gradients:
    """Computes the results of a backward outside of Inductor; for families that are lowered from templates, the
    reference runs instead.

    Args:
        site: the site's name, for profiles.

    Raises:
        ArgumentError: the family is unknown, or its kernels do not cover the call.
    """
    return execution(plan.kernel, "plan.kernel").backward(tensors, extras, call, plan, site)


def forward(query: Tensor, key: Tensor, value: Tensor, extras: Sequence[Tensor], call: Call, plan: Plan) -> Results:
    """Computes output and log-sum-exp of a call outside of Inductor, with the kernels of `plan.forward`.

    Raises:
        ArgumentError: the plan keeps the graph's own forward or has no forward tiles, or the family's kernels do not
            cover the call.
    """
    found = execution(plan.forward, "plan.forward")
    if plan.forward_tiles is None:
        raise ArgumentError("plan.forward_tiles", None, f"tiles, since the forward is {plan.forward!r}")
    return found.forward(query, key, value, extras, call, plan.forward_tiles)


def ready_forward(
    query: Tensor, key: Tensor, value: Tensor, extras: Sequence[Tensor], call: Call, plan: Plan
) -> ReadyForward | None:
    """Returns a cached launch plan of `forward` for tensors like these, or None if the family has none."""
    ready, tiles = execution(plan.forward, "plan.forward").ready_forward, plan.forward_tiles
    return None if ready is None or tiles is None else ready(query, key, value, extras, call, tiles)


def ready_backward(
    tensors: Tensors, extras: Sequence[Tensor], call: Call, plan: Plan, site: str
) -> ReadyBackward | None:
    """Returns a cached launch plan of `backward` for tensors like these, or None if the family has none."""
    ready = execution(plan.kernel, "plan.kernel").ready_backward
    return None if ready is None else ready(tensors, extras, call, plan, site)


def has_templates(name: str) -> bool:
    """Returns whether the family with this name, a `Plan.kernel` or a `Plan.forward`, is lowered from templates."""
    return any(each.name == name for each in FAMILIES) and execution(name).templates
