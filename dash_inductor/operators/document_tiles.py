"""The operator that lists the q tiles of packed documents for Hopper forwards: `dash_inductor::document_tiles`.

    document_tiles(extras, rows, mask, plan) -> Tensor

The result is the work list of `schedule.document_tiles`, as `kernels.common.document_tiles.build` describes it.  The
operator is a separate graph node, so that all layers with the same documents share it.  `extras` holds the tensors to
which the mask refers by index; `mask` and `plan` are texts (`model.Mask`, `model.Plan`); rows: the padded rows of the
mask (`model.VarlenLayout`).

Importing this module imports torch and defines the operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..model.mask import Mask
from ..model.plan import Plan, Tiles
from .direct import call_directly

if TYPE_CHECKING:
    from ..kernels.common.launch_list import Notes

_lib = torch.library.Library("dash_inductor", "FRAGMENT")
_lib.define("document_tiles(Tensor[] extras, SymInt rows, str mask, str plan) -> Tensor")

document_tiles = torch.ops.dash_inductor.document_tiles.default


def _tiles(plan: str) -> Tiles:
    tiles = Plan.parse(plan).forward_tiles
    if tiles is None:
        raise ArgumentError("plan", plan, "a plan with a forward of ours")
    return tiles


def _fake(extras: list[Tensor], rows: int, mask: str, plan: str) -> Tensor:
    from ..kernels.common.document_tiles import size

    return extras[0].new_empty(size(rows), dtype=torch.int32)


def _on_cpu(extras: list[Tensor], rows: int, mask: str, plan: str) -> Tensor:
    from ..kernels.common.document_tiles import reference

    return reference(Mask.parse(mask), extras, _tiles(plan))


def _on_cuda(extras: list[Tensor], rows: int, mask: str, plan: str) -> Tensor:
    from ..kernels.common import document_tiles as built

    def first(notes: Notes) -> Sequence[Tensor]:
        return [built.build(Mask.parse(mask), extras, _tiles(plan), notes)]

    return built.CALLS.call((mask, plan), extras, first)[0]


def _run(extras: list[Tensor], *arguments: Any) -> Tensor:
    return (_on_cuda if extras[0].is_cuda else _on_cpu)(extras, *arguments)


torch.library.register_fake("dash_inductor::document_tiles", _fake, lib=_lib)
_lib.impl("document_tiles", _on_cpu, "CPU")
_lib.impl("document_tiles", _on_cuda, "CUDA")
call_directly(document_tiles, _run)
