"""Compiled code calls implementations of sums by index and of tables of masks."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.graph import GraphLowering

from dash_inductor.operators.mask_tables import mask_tables
from dash_inductor.passes.ops import lowering
from dash_inductor.passes.ops.operators.index_sums import index_sums


def test_code_in_python_calls_the_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    lowering.register()
    codes: list[str] = []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(codes.append))
    values, keys, order = torch.randn(1, 6, 3), torch.tensor([0, 0, 2, 4]), torch.tensor([5, 1, 3, 0])

    def sums(values: torch.Tensor, keys: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return index_sums(None, values * 2, keys, order, 4)

    torch._dynamo.reset()
    found = torch.compile(sums)(values, keys, order)
    assert torch.equal(found, sums(values, keys, order))
    assert codes[-1].count("torch.ops.dash_inductor.index_sums.direct(") == 1
    assert ".default(" not in codes[-1]


def test_tables_have_one_too() -> None:
    assert callable(mask_tables.overloadpacket.direct)
