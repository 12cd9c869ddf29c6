"""Compiles the kernels of a site before its graph is rewritten, so that a failure leaves the site unchanged.

A Hopper kernel that is compiled here is the one that the operator launches.  The templates of a portable plan are
compiled by Inductor, when the rewrite can no longer be undone; so they are compiled here once per class of sites, as
`standalone` renders them (Triton caches the result on disk).  A kernel that fails only in Inductor's own rendering
still aborts the compile.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from ..config import config
from ..errors import ArgumentError, DashError
from ..kernels import registry
from ..kernels.execution import Compiled
from ..kernels.families import FAMILIES, family
from ..model.plan import Plan, Tiles
from ..model.site import Site
from ..records import profiles
from ..upstream import arch, compat, configs


def compile_kernels(site: Site, plan: Plan, device: torch.device, has_backward: bool = True) -> None:
    """Compiles the kernels that will run at `site`; does nothing for plans without compiled kernels.

    Args:
        has_backward: whether the site has a backward; if not, only the forward is compiled.

    Raises:
        ArgumentError: the plan's kernels must not be used under a setting of Inductor.
        DashError: a kernel needs more shared memory than `device` has.
        Exception: an error of the compiler.
    """
    if config.profile and not family(plan.kernel).stamps:
        able = " and ".join(each.name for each in FAMILIES if each.stamps)
        profiles.warn(f"sites of the {plan.kernel} kernel are not profiled: the {able} kernel alone is")
    if site.device == "cpu" or compat.interpreting() or not arch.is_there():
        return
    attempts = []
    of_forward, of_backward = (replace(site, spec=spec) for spec in (site.spec.of_forward, site.spec.of_backward))
    if has_backward:
        if registry.has_templates(plan.kernel):
            check_settings(plan)
        compiled = registry.execution(plan.kernel).compiled
        attempts += [(of_backward, compiled, n, n) for n in _lengths(site, plan.kernel, plan.dkdv)]
    if plan.forward_tiles is not None:
        forward = registry.execution(plan.forward)
        for kv_len in _lengths(site, plan.forward, plan.forward_tiles):
            lengths = forward.q_lens(site, kv_len)
            attempts += [(of_forward, forward.compiled_forward, q_len, kv_len) for q_len in lengths]
    for found, compiled, q_len, kv_len in attempts:
        # The generated code depends on nothing else, so equal layers and batches share one attempt.
        nominal = replace(found, batch=1, q_heads=site.group, kv_heads=1, q_len=q_len, kv_len=kv_len)
        error = _attempt(compiled, nominal, plan, device, config.profile)
        if error is not None:
            raise error


def check_settings(plan: Plan) -> None:
    """Raises ArgumentError for a plan with an ordered schedule if Inductor would benchmark its templates.

    A benchmark runs a kernel repeatedly, and from the second run on it would find used semaphores.
    """
    if plan.dq is None and configs.inductor.benchmark_fusion:
        raise ArgumentError("torch._inductor.config.benchmark_fusion", True, "False with an ordered schedule")


def _lengths(site: Site, kernel: str, tiles: Tiles) -> tuple[int, ...]:
    """Returns kv lengths that stand for the site's: a multiple of the kv tile, or not; both if kv_len is dynamic."""
    even, uneven = 8 * tiles.block_kv, 8 * tiles.block_kv + 1
    if registry.has_templates(kernel) and site.mask.varlen_layout is None:
        return (uneven,)  # takes at least as much of everything
    if site.mask.varlen_layout is not None:  # whose rows are whole tiles
        return (even,)
    if site.kv_len is None:
        return even, uneven
    return (uneven,) if site.kv_len % tiles.block_kv else (even,)


@functools.cache
def _attempt(compiled: Compiled, site: Site, plan: Plan, device: torch.device, profiled: bool) -> Exception | None:
    """Compiles once for all sites of a class and returns the error, if any; failing takes as long as succeeding.

    Args:
        profiled: the value of `config.profile`, which changes the kernels.
    """
    try:
        for kernel in compiled(site, plan, device):
            _check_shared_memory(kernel.metadata, device)
    except Exception as error:
        return error
    return None


def _check_shared_memory(metadata: Any, device: torch.device) -> None:
    """Raises DashError if a kernel needs more shared memory than the device has, as Triton does when it loads one."""
    limit = _shared_memory(device)
    if metadata.shared > limit:
        raise DashError(f"{metadata.name} needs {metadata.shared} bytes of shared memory, the device has {limit}")


def _shared_memory(device: torch.device) -> int:
    """Returns the shared memory in bytes that a CTA may use."""
    properties: Any = torch.cuda.get_device_properties(device)  # PyTorch's types lack this one
    return int(properties.shared_memory_per_block_optin)
