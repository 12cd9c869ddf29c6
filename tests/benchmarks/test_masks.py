"""The benchmark of masks: its visible pairs are the visible pairs of the attention that it runs."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._functorch.config as functorch_config

from benchmarks import common, masks
from benchmarks.masks import ROWS, Row
from dash_inductor.config import config
from dash_inductor.records.records import sites

LENGTH = 60


def small(row: Row) -> Row:
    """The row with less tokens and heads, and the ends of its documents or keys at the same parts of the length."""
    ends = tuple(tuple(end * LENGTH // row.length for end in of_one) for of_one in row.ends)
    kv_heads = 4 if row.q_heads == row.kv_heads else 2
    return dataclasses.replace(row, q_heads=4, kv_heads=kv_heads, length=LENGTH, ends=ends)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_pairs(row: Row) -> None:
    """If scores are equal and values are a unit matrix, keys with positive outputs were seen."""
    row = small(row)
    row = dataclasses.replace(row, head_dim=LENGTH)
    with mock.patch.object(masks, "DEVICE", "cpu"):
        options, more = masks._arguments(row)
        q, k, v, _ = (torch.zeros(t.shape) for t in row.tensors())
        options |= {"causal": row.kind == "dropout", "dropout": 0.0}
        out = masks.attend(q, k, v + torch.eye(LENGTH), *(t.float() for t in more), **options)
    assert int((out > 0).sum()) == row.pairs


@pytest.mark.usefixtures("deterministic")
def test_the_packed_operator() -> None:
    """It computes the attention of the row with a mask of documents."""
    row = dataclasses.replace(small(ROWS[0]), head_dim=16)
    torch._dynamo.reset()
    with mock.patch.object(masks, "DEVICE", "cpu"):
        options, _ = masks._arguments(row)
        expected = masks.attend(*row.tensors()[:3], **options)
        with config.patch(cpu="reference", strict=True):
            forward, backward = masks.CONTENDERS["operator"](row)
            torch.testing.assert_close(forward(), expected[0], atol=2e-2, rtol=2e-2)
            assert len(backward()) == 3
    assert [record.mask for record in sites()] == ["causal & segments(0,1):varlen(2,3)"]


def test_a_run_that_is_cut_off_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(row: Row, columns: list[str], repeats: int) -> dict[str, Any]:
        if row is ROWS[1]:
            raise KeyboardInterrupt
        return {"shape": row.name, "dash forward": 2.0, "columns": columns, "not run": {}}

    monkeypatch.setattr(masks, "measure", measure)
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["masks", "--columns", "dash", "--name", "cut_off"])
    with (
        functorch_config.patch(donated_buffer=True),
        pytest.raises(KeyboardInterrupt),
    ):  # which the program switches off
        masks.main()
    written = json.loads((tmp_path / "cut_off.json").read_text())
    assert [row["shape"] for row in written["rows"]] == [ROWS[0].name]
    assert written["options"] == {"only": [], "columns": ["dash"], "repeats": 20}
    assert "dash forward 2" in capsys.readouterr().err
