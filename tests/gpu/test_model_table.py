"""The table of models on a GPU, in bf16: the lines that were found for an H100, two equal runs, accurate gradients."""

from __future__ import annotations

import pytest
import torch

from ..support.model_table import Cell, agree, cells, check, explained_line, golden

pytest.importorskip("transformers", reason="the models come from the extra 'hf'")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


@pytest.mark.parametrize("cell", cells(device="cuda"), ids=str)
def test_model(cell: Cell) -> None:
    check(cell, "cuda", torch.compile)


@pytest.mark.parametrize("cell", cells(device="cuda"), ids=str)
def test_model_explained(cell: Cell) -> None:
    """From a model on the CPU, while a GPU is there."""
    assert agree(explained_line(cell), golden()["cuda"][str(cell)])
