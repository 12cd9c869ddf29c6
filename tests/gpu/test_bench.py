"""The bench command on a GPU: attention is replaced, and its bits are always the same."""

from __future__ import annotations

import json

import pytest

from dash_inductor import cli
from dash_inductor.bench import backward

pytestmark = pytest.mark.gpu


def test_quick_bench_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--quick", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == len(backward.QUICK)
    assert all(row["same bits"]["dash"] and not row["kept"] for row in rows)


def test_step_bench_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--step", "--json"]) == 0
