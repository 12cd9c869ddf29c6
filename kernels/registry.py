"""How the kernels of a family are compiled and run: the half of `planning.families` that needs torch and Triton.

What a family's kernels need is imported when it is first used: a process that only compiles needs no launcher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..model.call import Call
from ..model.plan import Plan
from ..model.site import Site
from ..planning import families

Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""grad_out, query, key, value, out and log-sum-exp, shaped as `dash_inductor.ops` says."""
Gradients = tuple[Tensor, Tensor, Tensor]
"""dq, dk and dv."""


@dataclass(frozen=True)
class Execution:
    """What a family's kernels need to run.

    Args:
        backward: runs them outside of Inductor.
        compiled: Triton's compiled kernels for a site on a CUDA device, compiled now.
        templates: Inductor lowers them from templates; else it calls the operator, which runs `backward`.
    """

    backward: Callable[[Tensors, Sequence[Tensor], Call, Plan], Gradients]
    compiled: Callable[[Site, Plan, torch.device], Iterator[Any]]
    templates: bool = False


def _reference(tensors: Tensors, extras: Sequence[Tensor], call: Call, plan: Plan) -> Gradients:
    from . import reference

    return reference.backward(*tensors, extras, call, plan)


def _hopper(tensors: Tensors, extras: Sequence[Tensor], call: Call, plan: Plan) -> Gradients:
    if not tensors[0].is_cuda:
        return _reference(tensors, extras, call, plan)
    from .hopper import launch

    return launch.backward(*tensors, call, plan)


def _nothing(site: Site, plan: Plan, device: torch.device) -> Iterator[Any]:
    return iter(())


def _compiled_templates(site: Site, plan: Plan, device: torch.device) -> Iterator[Any]:
    from . import standalone

    major, minor = torch.cuda.get_device_capability(device)
    for kernel in standalone.render(plan, site):
        yield standalone.build(kernel, f"sm_{major}{minor}")


def _compiled_hopper(site: Site, plan: Plan, device: torch.device) -> Iterator[Any]:
    from .hopper import build

    kernels = build.kernels(build.Specialisation.of_site(site, plan), device.index)
    yield from (kernels.prepare, kernels.main, kernels.finish)


EXECUTIONS: Mapping[str, Execution] = {
    families.REFERENCE.name: Execution(_reference, _nothing),
    families.PORTABLE.name: Execution(_reference, _compiled_templates, templates=True),
    families.HOPPER.name: Execution(_hopper, _compiled_hopper),
}
"""By the family's name, which is `Plan.kernel`."""


def backward(tensors: Tensors, extras: Sequence[Tensor], call: Call, plan: Plan) -> Gradients:
    """dq, dk and dv outside of Inductor; in place of templates the reference executor runs."""
    return EXECUTIONS[plan.kernel].backward(tensors, extras, call, plan)


def forward(
    query: Tensor, key: Tensor, value: Tensor, extras: Sequence[Tensor], call: Call, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a call, by the plan's forward."""
    from . import forward

    return forward.run(query, key, value, extras, call, plan)
