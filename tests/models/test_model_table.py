"""The table of models: what becomes of every attention of every family, two equal runs, and accurate gradients."""

from __future__ import annotations

from typing import Any

import pytest

from ..support.cases import some
from ..support.fakecuda import compiler
from ..support.graphs import capture
from ..support.hf_models import FAMILIES, WITH_CACHE
from ..support.model_table import (
    OTHERS,
    Cell,
    agree,
    assert_line,
    cells,
    check,
    explained_line,
    golden,
    h100_lines,
    merged,
)

pytest.importorskip("transformers", reason="the models come from the extra 'hf'")
pytestmark = pytest.mark.usefixtures("deterministic")

FEW = ["Gemma3", "GPT2", "ModernBert", "T5", "ViT"]
SOON = [Cell(family, "right" if "right" in FAMILIES[family].kinds else "plain", False) for family in FEW]
SOON += [Cell("Llama4", "packed", False)]
"""Cells of families that differ, but for Llama and Bert: tests/models/test_models.py trains those with every padding,
and packed.  `make test-models` checks all cells."""

H100 = "Llama4 packed"
"""The cell that is compiled for an H100 in every run of the tests: documents, and chunks of them as a dense mask."""

EXPLAINED = [
    Cell("GPT2", "plain", True),  # dropout
    Cell("T5", "right", False),  # a bias with a gradient
    Cell("DeepseekV3", "plain", False),  # another head dimension of value
    Cell("Llama4", "packed", False),  # documents, and chunks of them
    Cell("ModernBert", "right", False),  # windows on both sides
    Cell("Bert", "right", True),  # an encoder
]
"""The cells that are explained in every run of the tests: one of each kind."""


@some(cells(), SOON, "cell")
def test_model(cell: Cell) -> None:
    with capture() as graphs:
        check(cell, "cpu", graphs.compile)


@pytest.mark.skipif(compiler() is None, reason="the fake CUDA device needs a C++ compiler")
def test_model_for_an_h100() -> None:
    assert h100_lines([H100]) == {H100: golden()["cuda"][H100]}


@some(cells(device="cuda"), EXPLAINED, "cell")
def test_model_explained_for_an_h100(cell: Cell) -> None:
    """From a model on the CPU, by the fake tensors of `explain` and its own rules for PyTorch's choice of operators."""
    assert agree(explained_line(cell), golden()["cuda"][str(cell)])


@some(WITH_CACHE, ["Llama", "GPT2", "Bart"], "family")
def test_model_explained_with_its_cache(family: str) -> None:
    """With the cache that a configuration has by default, of which the table's models have none."""
    cell = Cell(family, "plain", False)
    assert agree(explained_line(cell, use_cache=True), golden()["cuda"][str(cell)])


@pytest.mark.full
@pytest.mark.skipif(compiler() is None, reason="the fake CUDA device needs a C++ compiler")
@pytest.mark.parametrize("family", FAMILIES)
def test_family_for_an_h100(family: str) -> None:
    assert h100_lines([family]) == {str(cell): golden()["cuda"][str(cell)] for cell in cells([family], "cuda")}


def test_every_attention_of_every_model_has_a_record() -> None:
    lines = golden()
    assert list(lines) == ["versions", "cpu", "cuda", OTHERS]
    for others in lines[OTHERS].values():  # only what differs
        assert list(others) == ["cpu", "cuda"]
        assert not [name for device in others for name, text in others[device].items() if lines[device][name] == text]
    lines = {device: lines[device] for device in ("cpu", "cuda")}
    assert all(list(found) == [str(cell) for cell in cells(device=device)] for device, found in lines.items())
    assert not [text for found in lines.values() for text in found.values() if "without a record" in text]


OF_ANOTHER_VERSION = [
    ("1 band(0,7), 1 causal", "no call"),
    ("3 dense(0)", "3 causal"),
    ("2 not replaced: math_path", "2 full"),
    ("2 full + bias, 4 not replaced: math_path", "6 full + bias"),
    ("1 band(-8,8), 1 not replaced: math_path", "1 band(-8,8), 1 full"),
    ("2 causal & keys(0) with the forward not replaced", "2 causal & keys(0)"),
    ("3 dense(0), 3 without a record", "2 causal, 4 full"),
    ("-2 without a record, 4 causal", "2 causal"),
    ("unknown: the program reads the value of a tensor in Python, and a fake one has none, at m.py:9", "2 causal"),
]
"""Found and expected: masks, calls and graphs that another version of transformers may have."""
OF_NO_VERSION = [
    ("2 without a record", "2 causal"),
    ("no call", "2 causal"),
    ("6 without a record", "2 causal, 4 full"),
    ("1 causal, 2 without a record", "3 causal"),
    ("-1 without a record", "no call"),
    ("2 not replaced: math_path", "2 causal"),
    ("2 not replaced: math_path", "2 causal & keys(0)"),
    ("2 not replaced: math_path", "no call"),
    ("1 causal, 1 not replaced: math_path", "2 causal"),
    ("1 full, 3 not replaced: math_path", "2 causal, 2 full"),
    ("1 causal, 1 not replaced: mask_unsupported", "2 causal"),
    ("2 full, 4 not replaced: mask_not_a_band", "6 full"),
    ("2 not replaced: dropout", "2 full"),
    ("unknown: AttributeError: 'Bart' has no attribute 'layers'", "2 causal"),
]
"""Found and expected: what is not replaced, or has no record, though the version cannot be the reason."""


@pytest.mark.parametrize("version", ["recorded", "another"])
def test_lines_that_agree(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = golden()["versions"]["transformers"]
    monkeypatch.setattr("transformers.__version__", recorded if version == "recorded" else "0." + recorded)
    for line in {line for pair in (*OF_ANOTHER_VERSION, *OF_NO_VERSION) for line in pair}:
        assert agree(line, line), line
    for found, expected in OF_ANOTHER_VERSION:
        assert agree(found, expected) == (version == "another"), (found, expected)
    for found, expected in OF_NO_VERSION:
        assert not agree(found, expected), (found, expected)


TABLE: dict[str, Any] = {
    "versions": {"torch": "1", "transformers": "3"},
    "cpu": {"Llama plain": "2 causal", "Bert plain": "2 full", "ViT plain": "2 full"},
    "cuda": {"Llama plain": "2 causal", "Bert plain": "2 full", "ViT plain": "2 full"},
    OTHERS: {"2": {"cpu": {"Bert plain": "2 not replaced: math_path"}, "cuda": {}}},
}
LLAMA, BERT, VIT = (Cell(family, "plain", False) for family in ("Llama", "Bert", "ViT"))


def test_lines_of_other_versions_are_stored_where_they_differ() -> None:
    found = {"cpu": {"Llama plain": "1 dense(0)", "Bert plain": "2 full"}, "cuda": {"Llama plain": "2 causal"}}
    assert merged(TABLE, found, {"torch": "1", "transformers": "2"}, other=True) == {
        **TABLE,
        OTHERS: {"2": {"cpu": {"Llama plain": "1 dense(0)"}, "cuda": {}}},
    }
    third = merged(TABLE, found, {"torch": "1", "transformers": "1"}, other=True)[OTHERS]
    assert list(third.items()) == [("1", {"cpu": {"Llama plain": "1 dense(0)"}, "cuda": {}}), *TABLE[OTHERS].items()]


def test_lines_of_the_table_are_added_to_the_others() -> None:
    """In the order of the cells, with the version that they were found with, which is then no other one."""
    versions = {"torch": "2", "transformers": "2"}
    after = merged(TABLE, {"cpu": {"Bert plain": "1 full"}, "cuda": {"Qwen2 plain": "2 causal"}}, versions, other=False)
    assert (list(after), after["versions"], after[OTHERS]) == (list(TABLE), versions, {})
    assert after["cpu"] == TABLE["cpu"] | {"Bert plain": "1 full"}
    assert list(after["cuda"]) == ["Llama plain", "Qwen2 plain", "Bert plain", "ViT plain"]


@pytest.mark.parametrize(
    ("version", "device", "cell", "right", "wrong"),
    [
        ("3", "cpu", LLAMA, "2 causal", "1 causal"),
        ("3", "cuda", BERT, "2 full", "2 not replaced: math_path"),
        ("2", "cpu", BERT, "2 not replaced: math_path", "2 full"),  # known, and so exact
        ("2", "cpu", LLAMA, "2 causal", "1 dense(0)"),
        ("2", "cuda", LLAMA, "1 dense(0)", "2 not replaced: mask_unsupported"),  # seen by a fake device only
        ("9", "cpu", VIT, "2 not replaced: math_path", "no call"),  # unknown, and so what agrees
    ],
)
def test_line_of_a_version(
    version: str, device: str, cell: Cell, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.__version__", version)
    monkeypatch.setattr("tests.support.model_table.golden", lambda: TABLE)
    assert_line(right, device, cell)
    with pytest.raises(AssertionError, match="expected"):
        assert_line(wrong, device, cell)
