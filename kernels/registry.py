"""Finds the kernel family that a plan names, and runs its kernels outside of Inductor."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import ArgumentError
from ..model.attention_spec import AttentionSpec
from ..model.plan import Plan
from .execution import Execution, Run
from .families import FAMILIES, family


def execution(name: str, argument: str = "family") -> Execution:
    """Returns the `Execution` of the family with this name, the value of a `Plan.kernel` or a `Plan.forward`.

    Raises:
        ArgumentError: no family has this name; the error names `argument`.
    """
    return family(name, argument).execution


def backward(tensors: Sequence[Tensor], extras: Sequence[Tensor], spec: AttentionSpec, plan: Plan, site: str) -> Run:
    """Returns a function that runs a backward outside of Inductor on any tensors with the layouts of `tensors`.

    For families that are lowered from templates, the reference executor (plain ATen) runs instead.

    Args:
        tensors, extras, spec, plan: as for the operator `attention_backward`.
        site: the site's name, for profiles.

    Raises:
        ArgumentError: the family is unknown, or its kernels do not cover the call.
    """
    return execution(plan.kernel, "plan.kernel").backward(tensors, extras, spec, plan, site)


def forward(tensors: Sequence[Tensor], extras: Sequence[Tensor], spec: AttentionSpec, plan: Plan, site: str) -> Run:
    """Returns the function that runs a forward outside of Inductor, for any tensors with the layouts of `tensors`.

    It runs the kernels of `plan.forward`, or the reference executor if that family is lowered from templates.

    Raises:
        ArgumentError: the plan keeps the graph's own forward or has no forward tiles, or the family's kernels do not
            cover the call.
    """
    found = execution(plan.forward, "plan.forward")
    if plan.forward_tiles is None:
        raise ArgumentError("plan.forward_tiles", None, f"tiles, since the forward is {plan.forward!r}")
    return found.forward(tensors, extras, spec, plan, site)


def has_templates(name: str) -> bool:
    """Returns whether Inductor lowers the family with this name from templates; False if no family has this name."""
    return any(each.name == name for each in FAMILIES) and execution(name).templates
