"""Files that commands write: what cannot be written is named before the work, without a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from dash_inductor.cli import main


@pytest.mark.parametrize("command", ["explain", "compare", "report", "verify"])
@pytest.mark.parametrize("place", ["a folder", "no folder"])
def test_a_page_that_cannot_be_written(
    command: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path if place == "a folder" else tmp_path / "nothing" / "page.html"
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('it must not run')")
    given = {"explain": [script], "verify": [script], "report": [tmp_path], "compare": [tmp_path, tmp_path]}[command]
    assert main([command, "--html", str(page), *map(str, given)]) == 2
    expected = f"dash-inductor {command}: html={str(page)!r} is not allowed: expected a file that can be written"
    assert capsys.readouterr().err.startswith(expected)


@pytest.mark.parametrize(("command", "option"), [("verify", "--folder"), ("report", "--pictures")])
def test_a_folder_that_is_a_file(command: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file.py"
    file.touch()
    given = file if command == "verify" else tmp_path
    assert main([command, option, str(file), str(given)]) == 2
    assert f"{option[2:]}={str(file)!r} is not allowed: expected a folder" in capsys.readouterr().err
