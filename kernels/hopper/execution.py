"""`EXECUTION` of the Hopper family: launches the kernels on CUDA devices; on the CPU the reference executor runs.

Modules are imported at first use, because a process that only compiles needs no launcher.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...config import config
from ...errors import ArgumentError
from ...model.attention_spec import AttentionSpec
from ...model.plan import Plan
from ...model.site import Site
from ..common.document_tiles import has_documents
from ..execution import Execution, Run
from ..reference import execution as reference
from .family import FAMILY


def _backward(tensors: Sequence[Tensor], extras: Sequence[Tensor], spec: AttentionSpec, plan: Plan, site: str) -> Run:
    if not tensors[0].is_cuda:
        return reference.backward(tensors, extras, spec, plan, site)
    _check_data(spec)
    from .backward.launch import prepare

    return prepare(tensors, extras, spec, plan, site)


def _forward(tensors: Sequence[Tensor], extras: Sequence[Tensor], spec: AttentionSpec, plan: Plan, site: str) -> Run:
    if not tensors[0].is_cuda:
        return reference.forward(tensors, extras, spec, plan, site)
    _check_data(spec)
    from .forward.build import check_tiles, tile_dims
    from .forward.launch import prepare

    query, _, value = tensors
    assert plan.forward_tiles is not None
    check_tiles(tile_dims(query.shape[-1], value.shape[-1]), plan.forward_tiles)
    return prepare(tensors, extras, spec, split_kv=plan.split_kv)


def _check_data(spec: AttentionSpec) -> None:
    """Raises ArgumentError unless the kernels support every trait of a call."""
    lacks = FAMILY.lacks(spec.traits)
    if lacks:
        raise ArgumentError("spec", str(spec), f"one whose kernels need not {' or '.join(lacks)}")


def _compiled(site: Site, plan: Plan, device: torch.device) -> Iterator[Any]:
    from .backward import build

    kernels = build.kernels(build.Specialisation.of_site(site, plan, config.profile), device.index)
    yield from (kernels.prepare, kernels.main, kernels.finish)


def _compiled_forward(site: Site, plan: Plan, device: torch.device) -> Iterator[Any]:
    from .forward import build, few

    of = build.Specialisation.of_site(site)
    if has_documents(site.spec):
        of = replace(of, elements=True)
        yield build.kernels(of.by_documents(), device.index).main
    kernels = build.kernels(of, device.index)
    yield from (kernels.prepare, kernels.main)
    parts = few.of_site(site, device.index) if plan.split_kv else None
    if parts is not None:
        yield from (parts.attend, parts.combine)


def _q_lens(site: Site, usual: int) -> tuple[int, ...]:
    from .forward import build

    return build.nominal_q_lens(site, usual)


EXECUTION = Execution(_backward, _forward, _compiled, _compiled_forward, q_lens=_q_lens)
