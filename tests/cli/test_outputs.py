"""Files that commands write: what cannot be written is named before the work, without a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from dash_inductor.cli import main


@pytest.mark.parametrize("place", ["a folder", "no folder"])
def test_a_page_that_cannot_be_written(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path if place == "a folder" else tmp_path / "nothing" / "page.html"
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('it must not run')")
    assert main(["explain", "--html", str(page), str(script)]) == 2
    expected = f"dash-inductor explain: html={str(page)!r} is not allowed: expected a file that can be written"
    assert capsys.readouterr().err.startswith(expected)
