"""Runs what a plan says: its kernels by the name of their family."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import ArgumentError
from ..model.call import Call
from ..model.plan import Plan
from .execution import Execution, Gradients, ReadyBackward, ReadyForward, Results, Tensors
from .families import FAMILIES, family


def execution(name: str, argument: str = "family") -> Execution:
    """How the kernels of a family of this name, a `Plan.kernel` or a `Plan.forward`, are compiled and run.

    Raises:
        ArgumentError: there is no such family; it names `argument`.
    """
    return family(name, argument).execution


def backward(tensors: Tensors, extras: Sequence[Tensor], call: Call, plan: Plan, site: str) -> Gradients:
    """dq, dk and dv outside of Inductor; in place of templates the reference executor runs.

    Args:
        site: the site's name, for profiles.

    Raises:
        ArgumentError: an unknown family, or what the family's kernels do not cover.
    """
    return execution(plan.kernel, "plan.kernel").backward(tensors, extras, call, plan, site)


def backward_with_delta(
    tensors: Tensors, extras: Sequence[Tensor], call: Call, plan: Plan, site: str
) -> tuple[Gradients, Tensor]:
    """As `backward`, and delta, see `operators.attention`."""
    return execution(plan.kernel, "plan.kernel").backward_with_delta(tensors, extras, call, plan, site)


def forward(query: Tensor, key: Tensor, value: Tensor, extras: Sequence[Tensor], call: Call, plan: Plan) -> Results:
    """Output and log-sum-exp of a call outside of Inductor, by the plan's forward.

    Raises:
        ArgumentError: a plan that keeps the graph's own forward or has no tiles for ours, or what the family's kernels
            do not cover.
    """
    found = execution(plan.forward, "plan.forward")
    if plan.forward_tiles is None:
        raise ArgumentError("plan.forward_tiles", None, f"tiles, since the forward is {plan.forward!r}")
    return found.forward(query, key, value, extras, call, plan.forward_tiles)


def ready_forward(
    query: Tensor, key: Tensor, value: Tensor, extras: Sequence[Tensor], call: Call, plan: Plan
) -> ReadyForward | None:
    """The function that runs `forward` of tensors like these in less time of the host, if the family has one."""
    ready, tiles = execution(plan.forward, "plan.forward").ready_forward, plan.forward_tiles
    return None if ready is None or tiles is None else ready(query, key, value, extras, call, tiles)


def ready_backward(
    tensors: Tensors, extras: Sequence[Tensor], call: Call, plan: Plan, site: str
) -> ReadyBackward | None:
    """The same of `backward`."""
    ready = execution(plan.kernel, "plan.kernel").ready_backward
    return None if ready is None else ready(tensors, extras, call, plan, site)


def bias_gradient(tensors: Tensors, extras: Sequence[Tensor], call: Call, plan: Plan, summed: Sequence[int]) -> Tensor:
    """The gradient of a call's bias outside of Inductor, by the reference executor: the families that read a bias are
    lowered from templates, or are that executor.
    """
    from .reference import backward as reference

    execution(plan.kernel, "plan.kernel")
    return reference.bias_gradient(*tensors, extras, call, plan, summed)


def has_templates(name: str) -> bool:
    """Whether kernels of this name, a `Plan.kernel` or a `Plan.forward`, are lowered from templates."""
    return any(each.name == name for each in FAMILIES) and execution(name).templates
