"""`EXECUTION` of the Hopper family: launches the kernels on CUDA devices; on the CPU the reference executor runs.

Modules are imported at first use, because a process that only compiles needs no launcher.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...config import config
from ...errors import ArgumentError
from ...model.call import Call
from ...model.plan import Plan, Tiles
from ...model.site import Site
from ..execution import Execution, Gradients, ReadyBackward, ReadyForward, Results, Tensors
from ..reference import execution as reference
from .family import FAMILY


def _backward(tensors: Tensors, extras: Sequence[Tensor], call: Call, plan: Plan, site: str) -> Gradients:
    if not tensors[0].is_cuda:
        return reference.backward(tensors, extras, call, plan, site)
    _check_data(call)
    from .backward.data import BackwardData
    from .backward.launch import backward
    from .shared.tensors import DropoutArguments

    dropout = DropoutArguments.of(call.dropout, extras)
    gradient = None if call.grad_logsumexp is None else extras[call.grad_logsumexp.index]
    data = BackwardData.of(call, extras)
    return backward(*tensors, call, plan, data, dropout, site, gradient)


def _forward(query: Tensor, key: Tensor, value: Tensor, extras: Sequence[Tensor], call: Call, tiles: Tiles) -> Results:
    if not query.is_cuda:
        return reference.forward(query, key, value, extras, call, tiles)
    _check_data(call)
    from .forward.build import check_tiles, tile_dims
    from .forward.data import ForwardData
    from .forward.launch import forward
    from .shared.tensors import DropoutArguments

    check_tiles(tile_dims(query.shape[3], value.shape[3]), tiles)
    data, dropout = ForwardData.of(call, extras), DropoutArguments.of(call.dropout, extras)
    sinks = None if call.sinks is None else extras[call.sinks.index]
    return forward(
        query, key, value, call, data, dropout, sinks
    )  # the operator copies where another order is asked for


def _ready_forward(
    query: Tensor, key: Tensor, value: Tensor, extras: Sequence[Tensor], call: Call, tiles: Tiles
) -> ReadyForward | None:
    if not query.is_cuda:
        return None
    _check_data(call)
    from .forward.build import check_tiles, tile_dims
    from .forward.launch import ready

    check_tiles(tile_dims(query.shape[3], value.shape[3]), tiles)
    return ready(query, key, value, extras, call)


def _ready_backward(
    tensors: Tensors, extras: Sequence[Tensor], call: Call, plan: Plan, site: str
) -> ReadyBackward | None:
    if not tensors[0].is_cuda:
        return None
    _check_data(call)
    from .backward.launch import ready

    return ready(*tensors, extras, call, plan, site)


def _check_data(call: Call) -> None:
    """Raises ArgumentError unless the kernels support every trait of a call."""
    lacks = FAMILY.lacks(call.traits)
    if lacks:
        raise ArgumentError("call", str(call), f"one whose kernels need not {' or '.join(lacks)}")


def _compiled(site: Site, plan: Plan, device: torch.device) -> Iterator[Any]:
    from .backward import build

    kernels = build.kernels(build.Specialisation.of_site(site, plan, config.profile), device.index)
    yield from (kernels.prepare, kernels.main, kernels.finish)


def _compiled_forward(site: Site, plan: Plan, device: torch.device) -> Iterator[Any]:
    from .forward import build, few

    kernels = build.kernels(build.Specialisation.of_site(site), device.index)
    yield from (kernels.prepare, kernels.main)
    parts = few.of_site(site, device.index)
    if parts is not None:
        yield from (parts.attend, parts.combine)


def _q_lens(site: Site, usual: int) -> tuple[int, ...]:
    from .forward import build

    return build.nominal_q_lens(site, usual)


EXECUTION = Execution(
    _backward, _forward, _compiled, _compiled_forward, q_lens=_q_lens,
    ready_forward=_ready_forward, ready_backward=_ready_backward,
)  # fmt: skip
