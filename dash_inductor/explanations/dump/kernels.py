"""Compiles the kernels of a plan to show their source, IR, PTX and resource usage; no GPU is needed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...kernels import registry
from ...kernels.portable import standalone
from ...model.plan import Plan
from ...model.site import NOMINAL_LEN, Site

TEXTS = {"source": "py", "ttgir": "ttgir", "ptx": "ptx"}
"""The texts of a kernel, and their file suffixes."""


@dataclass(frozen=True)
class BuiltKernel:
    """A compiled kernel, for display.

    Args:
        name: the name of the kernel function.
        of: "forward" or "backward".
        resources: registers and spilled bytes per thread, bytes of shared memory per CTA.
        warps: the number of warps per CTA.
        texts: its source, Triton GPU IR and PTX, by the keys of `TEXTS`.
    """

    name: str
    of: str
    resources: standalone.Resources
    warps: int
    texts: dict[str, str]


@functools.lru_cache(maxsize=64)
def built(site: Site, plan: Plan, arch: str) -> tuple[BuiltKernel, ...]:
    """Compiles the kernels of a plan for `arch`, those of the backward first.

    The reference plan, which calls PyTorch operators, has none: the result is empty.  Dynamic sizes are replaced by the
    planner's nominal ones.

    Raises:
        Exception: an error of the compiler.
    """
    length = NOMINAL_LEN
    site = replace(site, batch=site.batch or 1, q_len=site.q_len or length, kv_len=site.kv_len or length)
    found = [("backward", kernel) for kernel in _backward(site, plan, arch)]
    if plan.forward_tiles is not None:
        found += [("forward", kernel) for kernel in _forward(site, plan, arch)]
    return tuple(_described(of, kernel, arch) for of, kernel in found)


def is_rendered(name: str) -> bool:
    """Whether a kernel family, named by `Plan.kernel` or `Plan.forward`, renders its kernels from source templates."""
    return registry.has_templates(name)


def _backward(site: Site, plan: Plan, arch: str) -> Iterator[Any]:
    if registry.has_templates(plan.kernel):
        return (standalone.build(kernel, arch) for kernel in standalone.render(plan, site))
    return registry.execution(plan.kernel).compiled(site, plan, torch.device("cuda", 0))


def _forward(site: Site, plan: Plan, arch: str) -> Iterator[Any]:
    if registry.has_templates(plan.forward):
        return iter((standalone.build(standalone.render_forward(plan, site), arch),))
    return registry.execution(plan.forward).compiled_forward(site, plan, torch.device("cuda", 0))


def _described(of: str, kernel: Any, arch: str) -> BuiltKernel:
    source = kernel.src.fn.raw_src  # the lines of the function
    texts = {"source": "".join(source), **{name: kernel.asm[name] for name in TEXTS if name != "source"}}
    resources = standalone.resources(kernel, arch)
    return BuiltKernel(kernel.metadata.name, of, resources, kernel.metadata.num_warps, texts)
