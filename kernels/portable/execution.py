"""`EXECUTION` of the portable family: Inductor lowers the kernels; outside of Inductor the reference executor runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...model.plan import Plan
from ...model.site import Site
from ..execution import Execution
from ..reference.execution import backward, forward


def _compiled(site: Site, plan: Plan, device: torch.device) -> Iterator[Any]:
    from . import standalone

    for kernel in standalone.render(plan, site):
        yield standalone.build(kernel, _arch_of(device))


def _compiled_forward(site: Site, plan: Plan, device: torch.device) -> Iterator[Any]:
    from . import standalone

    yield standalone.build(standalone.render_forward(plan, site), _arch_of(device))


def _arch_of(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


EXECUTION = Execution(backward, forward, _compiled, _compiled_forward, templates=True)
