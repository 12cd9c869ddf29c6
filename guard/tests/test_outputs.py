"""Files that commands write: what cannot be written is named before the work, without a traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dash_guard.cli import main


@pytest.mark.parametrize("command", ["compare", "report", "verify"])
@pytest.mark.parametrize("place", ["a folder", "no folder"])
def test_a_page_that_cannot_be_written(
    command: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path if place == "a folder" else tmp_path / "nothing" / "page.html"
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('it must not run')")
    given = {"verify": [script], "report": [tmp_path], "compare": [tmp_path, tmp_path]}[command]
    assert main([command, "--html", str(page), *map(str, given)]) == 2
    expected = f"dash-guard {command}: --html {page} is not allowed: expected a file that can be written"
    assert capsys.readouterr().err.startswith(expected)


@pytest.mark.parametrize(("command", "option"), [("verify", "--folder"), ("report", "--pictures")])
def test_a_folder_that_is_a_file(command: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file.py"
    file.touch()
    given = file if command == "verify" else tmp_path
    assert main([command, option, str(file), str(given)]) == 2
    assert f"{option} {file} is not allowed: expected a folder" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["record", "verify", "watch"])
@pytest.mark.parametrize("folder", ["/dev/full", "/proc/runs"])
def test_a_folder_that_cannot_be_written(command: str, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [__file__] if command == "verify" else ["--", "false"]
    assert main([command, "--folder", folder, *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"dash-guard {command}: --folder {folder} is not allowed: expected a folder that can be")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "foo=1"], "--set foo=1 is not allowed: expected NAME=VALUE of every, "),
        (["--set", "at_rest=1,foo=1"], "--set foo=1 is not allowed: expected NAME=VALUE of every, "),
        (["--set", "at_rest=1", "--set=every=0"], "--set every=0 is not allowed: expected a whole number from 1 "),
        (["--set", "every"], "--set every is not allowed: expected a whole number from 1 "),
        (["--set", "every=01,every=00"], "--set every=00 is not allowed: expected a whole number from 1 "),
        (["--set", "on_confirmed=stop"], "--set on_confirmed=stop is not allowed: expected one of 'warn', 'raise'"),
        (["--listen", "here"], "--listen here is not allowed: expected HOST:PORT"),
        (["--join", "here"], "--join here is not allowed: expected HOST:PORT"),
    ],
)
def test_a_setting_of_watch_that_is_wrong(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", "--folder", str(tmp_path), *words, "--", "false"]) == 2
    assert capsys.readouterr().err.startswith(f"dash-guard watch: {message}")


def test_a_program_that_is_recorded(tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "runs"
    lines = "import sys, torch", "torch.manual_seed(0)", "torch.nn.Linear(2, 2)(torch.ones(1, 2))"
    script.write_text("\n".join([*lines, "sys.exit(int(sys.argv[1]))"]))
    program = ["--", sys.executable, str(script)]
    assert main(["record", "--folder", str(folder / "a"), *program, "0"]) == 0
    assert [path.name for path in (folder / "a").iterdir()] == ["rank00000.dash"]
    assert main(["record", "--folder", str(folder / "b"), *program, "3"]) == 3
    assert main(["compare", str(folder / "a"), str(folder / "b")]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--"], "program='nothing' is not allowed: expected a program with its arguments, after --"),
        (["--", "no-such-program"], "program='no-such-program' is not allowed: expected a program that can be run"),
        (["--", "true"], "true has left no recording"),
    ],
)
def test_what_cannot_be_recorded(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["record", "--folder", str(tmp_path / "runs"), *words]) == 2
    assert f"dash-guard record: {message}" in capsys.readouterr().err


def test_a_recording_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank00000.dash").touch()
    assert main(["record", "--folder", str(tmp_path), "--", "true"]) == 2
    assert "has a recording already" in capsys.readouterr().err
