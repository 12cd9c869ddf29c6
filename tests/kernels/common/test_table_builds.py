"""The kernels that make tables compile for sm_90 without a GPU: functions may take other things in other Tritons."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from dash_inductor.kernels.common import mask_tables
from dash_inductor.kernels.common.mask_data import MaskData
from dash_inductor.model import AttentionSpec, Band, Mask, Site
from dash_inductor.planning import plan
from dash_inductor.upstream.triton_compiler import ASTSource, GPUTarget

from ...support.varlen_layout import Rows, mask_of

TYPES = {torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1", torch.uint8: "*u8", torch.int8: "*i8"}
BATCH, HEADS, LENGTH = 2, 4, 1000
MASKS = [
    "keys(0)",
    "causal & segments(0,1)",
    "interval(0,none,none)",
    "causal & head_interval(0,none)",
    "causal & segments(0,1) & keys(2) & head_interval(3,4)",
    "causal & dilated(0,1)",
    "causal & segments(0,1) & keys(2) & interval(3,4,5)",
    "band(-5,70) & segments(0,0) & dense(1)",
]


def operands(mask: Mask) -> list[Tensor]:
    """Tensors for all that a mask reads."""
    by_head = (BATCH, HEADS, LENGTH)
    shapes = {"keys": (BATCH, LENGTH), "dense": (*by_head, LENGTH), "head_interval": (*by_head, 1)}
    names = {
        operand.index: component.NAME for component in mask.components.values() for operand in component.given.values()
    }
    return [
        torch.ones(shapes.get(name, (BATCH, LENGTH)), dtype=torch.bool if name in ("keys", "dense") else torch.int64)
        for _, name in sorted(names.items())
    ]


def compile_instead(self: Any, kernel: Any, grid: Any, *arguments: Tensor | int, **constants: Any) -> None:
    """In the place of a launch."""
    given = iter(arguments)
    signature: dict[str, str] = {}
    for name in kernel.arg_names:
        argument = "constexpr" if name in constants else next(given)
        is_tensor = isinstance(argument, Tensor)
        signature[name] = TYPES[argument.dtype] if is_tensor else argument if isinstance(argument, str) else "i32"  # type: ignore[union-attr]
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert built.asm["ptx"]


@pytest.mark.parametrize("text", MASKS)
def test_tables_compile(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = Mask.parse(text)
    site = Site("cuda", "bfloat16", BATCH, HEADS, HEADS, LENGTH, LENGTH, 128, 128, AttentionSpec(mask, 0.1))
    monkeypatch.setattr(mask_tables._Builder, "_launch", compile_instead)
    data = MaskData.of(mask, operands(mask), (BATCH, HEADS, HEADS, LENGTH, LENGTH))
    mask_tables.build(data, plan(site, "sm_90"))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("band", [Band(), Band(0), Band(0, 99)], ids=str)
def test_tables_of_packed_documents_compile(band: Band, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, launched = Rows((300, 1, 64)), list[str]()
    sizes = 1, HEADS, HEADS, rows.rows, rows.rows
    site = Site("cuda", "bfloat16", *sizes, dim, dim, AttentionSpec(mask_of(band), 0.1))

    def compiled(self: Any, kernel: Any, *arguments: Any, **constants: Any) -> None:
        launched.append(kernel.__name__)
        compile_instead(self, kernel, *arguments, **constants)

    monkeypatch.setattr(mask_tables._Builder, "_launch", compiled)
    mask_tables.build(MaskData.of(mask_of(band), rows.operands(), sizes), plan(site, "sm_90"))
    assert launched == ["write_document_tables"]
