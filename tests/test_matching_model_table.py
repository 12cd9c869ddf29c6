"""The table of models: what becomes of every attention of every family, two equal runs, and accurate gradients."""

from __future__ import annotations

import pytest

from .support.fakecuda import compiler
from .support.graphs import capture
from .support.hf_models import FAMILIES
from .support.model_table import Cell, cells, check, golden, h100_lines

pytest.importorskip("transformers", reason="the models come from the extra 'hf'")
pytestmark = pytest.mark.usefixtures("deterministic")

FEW = ["Gemma3", "Phi3", "GPT2", "Llama4", "ModernBert", "T5", "ViT", "Whisper"]
SOON = [Cell(family, "right" if "right" in FAMILIES[family].kinds else "plain", False) for family in FEW]
SOON += [Cell("Llama4", "packed", False)]
"""Cells of families that differ, but for Llama and Bert: tests/test_matching_models.py trains those with every padding,
and packed.  `make test-models` checks all cells."""

H100 = "Llama4 packed"
"""The cell that is compiled for an H100 in every run of the tests: documents, and chunks of them as a dense mask."""


def params(soon: list[Cell]) -> list[object]:
    return [pytest.param(cell, id=str(cell), marks=[] if cell in soon else pytest.mark.full) for cell in cells()]


@pytest.mark.parametrize("cell", params(SOON))
def test_model(cell: Cell) -> None:
    with capture() as graphs:
        check(cell, "cpu", graphs.compile)


@pytest.mark.skipif(compiler() is None, reason="the fake CUDA device needs a C++ compiler")
def test_model_for_an_h100() -> None:
    assert h100_lines([H100]) == {H100: golden()["cuda"][H100]}


@pytest.mark.full
@pytest.mark.skipif(compiler() is None, reason="the fake CUDA device needs a C++ compiler")
@pytest.mark.parametrize("family", FAMILIES)
def test_family_for_an_h100(family: str) -> None:
    assert h100_lines([family]) == {str(cell): golden()["cuda"][str(cell)] for cell in cells([family], "cuda")}


def test_every_attention_of_every_model_has_a_record() -> None:
    lines = golden()
    assert list(lines) == ["versions", "cpu", "cuda"]
    lines = {device: lines[device] for device in ("cpu", "cuda")}
    assert all(list(found) == [str(cell) for cell in cells(device=device)] for device, found in lines.items())
    assert not [text for found in lines.values() for text in found.values() if "without a record" in text]
