"""How the kernels of a family are compiled and run: the half of `planning.families` that needs torch and Triton.

What a family's kernels need is imported when it is first used: a process that only compiles needs no launcher.  Later
calls find names in modules, which takes less than to find modules in packages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import config
from ..errors import ArgumentError
from ..model.call import Call
from ..model.plan import Plan, Tiles
from ..model.site import Site
from ..planning import families

Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""grad_out, query, key, value, out and log-sum-exp, shaped as `dash_inductor.operators.attention` says."""
Gradients = tuple[Tensor, Tensor, Tensor]
"""dq, dk and dv."""
Results = tuple[Tensor, Tensor]
"""Output and log-sum-exp."""
Compiled = Callable[[Site, Plan, torch.device], Iterator[Any]]
"""Triton's compiled kernels for a site on a CUDA device, compiled now."""


def _usual_q_lens(site: Site, usual: int) -> tuple[int, ...]:
    return (usual,)


def _hopper_q_lens(site: Site, usual: int) -> tuple[int, ...]:
    from .hopper.forward import build

    return build.nominal_q_lens(site, usual)


@dataclass(frozen=True)
class Execution:
    """What a family's kernels need to run.

    Args:
        backward, forward: run them outside of Inductor; the backward is given the site's name, the forward its tiles.
        compiled, compiled_forward: the kernels of the backward, and of the forward.
        templates: Inductor lowers them from templates; else it calls the operator, which runs `backward`.
        q_lens: (site, a usual number of queries) -> those for which the site needs different forward kernels.
    """

    backward: Callable[[Tensors, Sequence[Tensor], Call, Plan, str], Gradients]
    forward: Callable[[Tensor, Tensor, Tensor, Sequence[Tensor], Call, Tiles], Results]
    compiled: Compiled
    compiled_forward: Compiled
    templates: bool = False
    q_lens: Callable[[Site, int], tuple[int, ...]] = _usual_q_lens


def _reference(tensors: Tensors, extras: Sequence[Tensor], call: Call, plan: Plan, site: str) -> Gradients:
    from .reference import backward as reference

    return reference.backward(*tensors, extras, call, plan)


def _reference_forward(
    query: Tensor, key: Tensor, value: Tensor, extras: Sequence[Tensor], call: Call, tiles: Tiles
) -> Results:
    from .reference import forward as reference_forward

    return reference_forward.forward(query, key, value, extras, call, tiles)


def _hopper(tensors: Tensors, extras: Sequence[Tensor], call: Call, plan: Plan, site: str) -> Gradients:
    if not tensors[0].is_cuda:
        return _reference(tensors, extras, call, plan, site)
    _check_data(call)
    from .hopper.backward.data import BackwardData
    from .hopper.backward.launch import backward

    dropout = call.dropout
    drops = None if dropout is None else (extras[dropout.seed.index], dropout.threshold, dropout.rescale)
    return backward(*tensors, call, plan, BackwardData.of(call, extras), drops, site)


def _hopper_forward(
    query: Tensor, key: Tensor, value: Tensor, extras: Sequence[Tensor], call: Call, tiles: Tiles
) -> Results:
    if not query.is_cuda:
        return _reference_forward(query, key, value, extras, call, tiles)
    _check_data(call)
    from .hopper.forward.build import check_tiles, dims_of
    from .hopper.forward.data import ForwardData, ForwardDropout
    from .hopper.forward.launch import forward

    check_tiles(dims_of(query.shape[3], value.shape[3]), tiles)
    (order,) = call.orders
    order = order if order[-1] == 3 else (0, 1, 2, 3)  # the operator copies where another one is asked for
    data, dropout = ForwardData.of(call, extras), ForwardDropout.of(call.dropout, extras)
    return forward(query, key, value, call.mask.band, call.scale, order, data, dropout)


def _check_data(call: Call) -> None:
    """Raise ArgumentError unless the Hopper kernels read all that a call reads of data."""
    if not call.data <= families.HOPPER.reads:
        raise ArgumentError("call", str(call), f"one that reads {sorted(families.HOPPER.reads)} alone")


def _nothing(site: Site, plan: Plan, device: torch.device) -> Iterator[Any]:
    return iter(())


def _compiled_templates(site: Site, plan: Plan, device: torch.device) -> Iterator[Any]:
    from .portable import standalone

    for kernel in standalone.render(plan, site):
        yield standalone.build(kernel, _arch_of(device))


def _compiled_forward_template(site: Site, plan: Plan, device: torch.device) -> Iterator[Any]:
    from .portable import standalone

    yield standalone.build(standalone.render_forward(plan, site), _arch_of(device))


def _arch_of(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _compiled_hopper(site: Site, plan: Plan, device: torch.device) -> Iterator[Any]:
    from .hopper.backward import build

    kernels = build.kernels(build.Specialisation.of_site(site, plan, config.profile), device.index)
    yield from (kernels.prepare, kernels.main, kernels.finish)


def _compiled_hopper_forward(site: Site, plan: Plan, device: torch.device) -> Iterator[Any]:
    from .hopper.forward import build

    kernels = build.kernels(build.Specialisation.of_site(site), device.index)
    yield from (kernels.prepare, kernels.main)


EXECUTIONS: Mapping[str, Execution] = {
    families.REFERENCE.name: Execution(_reference, _reference_forward, _nothing, _nothing),
    families.PORTABLE.name: Execution(
        _reference, _reference_forward, _compiled_templates, _compiled_forward_template, templates=True
    ),
    families.HOPPER.name: Execution(
        _hopper, _hopper_forward, _compiled_hopper, _compiled_hopper_forward, q_lens=_hopper_q_lens
    ),
}
"""By the family's name, which is `Plan.kernel` and, unless the graph's own forward is kept, `Plan.forward`."""


def backward(tensors: Tensors, extras: Sequence[Tensor], call: Call, plan: Plan, site: str) -> Gradients:
    """dq, dk and dv outside of Inductor; in place of templates the reference executor runs.

    Args:
        site: the site's name, for profiles.

    Raises:
        ArgumentError: an unknown family, or what the family's kernels do not cover.
    """
    return _execution("plan.kernel", plan.kernel).backward(tensors, extras, call, plan, site)


def forward(query: Tensor, key: Tensor, value: Tensor, extras: Sequence[Tensor], call: Call, plan: Plan) -> Results:
    """Output and log-sum-exp of a call outside of Inductor, by the plan's forward.

    Raises:
        ArgumentError: a plan that keeps the graph's own forward or has no tiles for ours, or what the family's kernels
            do not cover.
    """
    execution = _execution("plan.forward", plan.forward)
    if plan.forward_tiles is None:
        raise ArgumentError("plan.forward_tiles", None, f"tiles, since the forward is {plan.forward!r}")
    return execution.forward(query, key, value, extras, call, plan.forward_tiles)


def bias_gradient(tensors: Tensors, extras: Sequence[Tensor], call: Call, plan: Plan, summed: Sequence[int]) -> Tensor:
    """The gradient of a call's bias outside of Inductor, by the reference executor: the families that read a bias are
    lowered from templates, or are that executor.
    """
    from .reference import backward as reference

    _execution("plan.kernel", plan.kernel)
    return reference.bias_gradient(*tensors, extras, call, plan, summed)


def _execution(argument: str, name: str) -> Execution:
    if name not in EXECUTIONS:
        raise ArgumentError(argument, name, EXECUTIONS)
    return EXECUTIONS[name]


def has_templates(name: str) -> bool:
    """Whether kernels of this name, a `Plan.kernel` or a `Plan.forward`, are lowered from templates."""
    return name in EXECUTIONS and EXECUTIONS[name].templates
