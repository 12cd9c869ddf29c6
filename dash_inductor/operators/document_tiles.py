"""The operators that list the q tiles of documents for Hopper forwards.

    document_tiles(extras, rows, mask, plan) -> Tensor
    document_tiles_of_mask(numbers, mask, plan) -> Tensor[]

The results are the work list of `schedule.document_tiles`, as `kernels.common.document_tiles.build` describes it for
packed documents, and the results of `build_by_mask` for a mask that names them.  The operators are separate graph
nodes, so that all layers with the same documents share them.

`extras` holds the tensors to which the mask refers by index; `mask` and `plan` are texts (`model.Mask`, `model.Plan`);
rows: the padded rows of the mask (`model.VarlenLayout`); numbers: those of Note [Documents of a mask] in
`kernels.common.document_tiles`, [batch, tokens] or, as the vectors of queries of `mask_tables`, [batch, 1, tokens].

Importing this module imports torch and defines the operators.
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

_lib.define("document_tiles_of_mask(Tensor numbers, str mask, str plan) -> Tensor[]")

document_tiles = torch.ops.dash_inductor.document_tiles.default
document_tiles_of_mask = torch.ops.dash_inductor.document_tiles_of_mask.default


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


def _fake_of_mask(numbers: Tensor, mask: str, plan: str) -> list[Tensor]:
    from ..kernels.common.document_tiles import shapes_by_mask

    shapes = shapes_by_mask(numbers.shape[0], numbers.shape[-1], _tiles(plan))
    return [numbers.new_empty(shape, dtype=torch.int32) for shape in shapes]


def _of_tokens(numbers: Tensor) -> Tensor:
    return numbers.squeeze(1) if numbers.dim() == 3 else numbers


def _of_mask_on_cpu(numbers: Tensor, mask: str, plan: str) -> list[Tensor]:
    from ..kernels.common.document_tiles import reference_by_mask

    return [*reference_by_mask(_of_tokens(numbers), Mask.parse(mask).band, _tiles(plan))]


def _of_mask_on_cuda(numbers: Tensor, mask: str, plan: str) -> list[Tensor]:
    from ..kernels.common import document_tiles as built

    def first(notes: Notes) -> Sequence[Tensor]:
        return built.build_by_mask(_of_tokens(numbers), Mask.parse(mask).band, _tiles(plan), notes)

    return built.CALLS.call((mask, plan), [numbers], first)


def _run_of_mask(numbers: Tensor, *texts: str) -> list[Tensor]:
    return (_of_mask_on_cuda if numbers.is_cuda else _of_mask_on_cpu)(numbers, *texts)


for _operator, _fakes, _cpu, _cuda, _direct in (
    (document_tiles, _fake, _on_cpu, _on_cuda, _run),
    (document_tiles_of_mask, _fake_of_mask, _of_mask_on_cpu, _of_mask_on_cuda, _run_of_mask),
):
    torch.library.register_fake(f"dash_inductor::{_operator._opname}", _fakes, lib=_lib)
    _lib.impl(_operator._opname, _cpu, "CPU")
    _lib.impl(_operator._opname, _cuda, "CUDA")
    call_directly(_operator, _direct)
