"""What commands write, and how they refuse: in one line, which names what was typed, before the work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dash_inductor.cli import main, outputs
from dash_inductor.errors import ArgumentError
from tests.support.processes import HANGS

PLAN = ("plan", "--shape", "1,4,2,1024,1024,128")


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text("raise SystemExit('it must not run')")
    return str(path)


@pytest.mark.parametrize("place", ["a folder", "no folder", "/dev/full", "/proc/page.html"])
@pytest.mark.parametrize("words", [("explain", "--html"), (*PLAN, "--timeline")], ids=["explain", "plan"])
def test_a_file_that_cannot_be_written(
    words: tuple[str, ...], place: str, script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = {"a folder": tmp_path, "no folder": tmp_path / "nothing" / "page.svg"}.get(place, Path(place))
    assert main([*words, str(page), *([script] if words[0] == "explain" else [])]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"dash-inductor {words[0]}: {words[-1]} {page} is not allowed: expected a file ")
    assert (out, err.count("\n")) == ("", 1)


@pytest.mark.parametrize("place", ["/dev/full", "/proc/pages", "/dev/full/pages", "script.py", "script.py/pages"])
@pytest.mark.parametrize("flag", ["-o", "--output", "--out"])
def test_a_folder_that_cannot_be_written(
    flag: str, place: str, script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(script).parent)
    assert main(["dump", flag, place, script]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"dash-inductor dump: {flag} {place} is not allowed: expected a folder that can be written")
    assert (out, err.count("\n")) == ("", 1)


def test_checks_leave_nothing_behind(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    outputs.check("html", page)
    outputs.check_folder("output", tmp_path / "some" / "pages")
    assert list(tmp_path.iterdir()) == []
    page.write_text("old")
    outputs.check("html", page)
    assert page.read_text() == "old"
    outputs.check("html", Path("/dev/null"))
    outputs.check("html", None)
    outputs.check_folder("output", None)
    with pytest.raises(ArgumentError, match="output="):
        outputs.check_folder("output", page)


@pytest.mark.parametrize(("encoding", "unit"), [("ascii", "\\xb5s"), ("latin-1", "\xb5s"), ("utf-8", "\xb5s")])
def test_an_encoding_of_the_standard_output(encoding: str, unit: str) -> None:
    command = [sys.executable, "-m", "dash_inductor", *PLAN, "--arch", "h200"]
    given = {**os.environ, "PYTHONIOENCODING": encoding}
    ended = subprocess.run(command, env=given, capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert unit in ended.stdout.decode(encoding)


@pytest.mark.parametrize("words", [PLAN, ("doctor",)], ids=["plan", "doctor"])
def test_a_full_standard_output(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "dash_inductor", *words]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 2
    line = f"dash-inductor {words[0]}: the standard output cannot be written: No space left on device"
    assert ended.stderr.splitlines() == [line]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("exlpain", "there is no command 'exlpain': did you mean explain?"),
        ("Plan", "there is no command 'Plan': did you mean plan?"),
        ("zzz", "there is no command 'zzz': expected one of doctor, dump, explain, plan"),
    ],
)
def test_a_command_that_does_not_exist(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "train.py"])
    assert left.value.code == 2
    assert capsys.readouterr().err.endswith(f"dash-inductor: error: {message}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--arch", "v100"), "--arch v100 is not allowed: expected one of 'a100', "),
        (("--arch=v100",), "--arch v100 is not allowed: expected one of 'a100', "),
        (("--dropo", "1.5"), "--dropo 1.5 is not allowed: expected a number greater than 0 and less than 1"),
        (("--mask", "keys:5, 6"), "--mask 'keys:5, 6' is not allowed: expected "),
        (("--mask", "keys:5,6"), "--mask keys:5,6 is not allowed: expected keys: "),
    ],
)
def test_an_error_names_the_flag_that_was_typed(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PLAN, *words]) == 2
    assert capsys.readouterr().err.startswith(f"dash-inductor plan: {message}")


@pytest.mark.parametrize(("terminal", "width"), [(None, 100), (20, 60), (80, 80), (120, 120), (400, 160)])
def test_text_has_the_width_of_the_terminal(
    terminal: int | None, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But it is 100 columns wide where the output goes elsewhere, whatever the terminal."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal is not None)
    monkeypatch.setenv("COLUMNS", str(terminal or 40))
    assert outputs.columns() == width
    assert main(["plan", "--arch", "h100", "--shape", "2,16,4,8192,8192,128", "--mask", "causal"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert width - 20 < max(map(len, lines)) <= width or width == 160  # nothing is that long


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dash-inductor pl", {"plan"}),
        ("dash-inductor plan --sch", {"--schedule"}),
        ("dash-inductor explain --ht", {"--html"}),
        ("dash-inductor doctor --v", {"--verbose"}),
        ("dash-guard ", {"compare", "record", "report", "verify", "watch"}),
        ("dash-guard watch --met", {"--metrics"}),
    ],
)
def test_shells_complete(line: str, expected: set[str], tmp_path: Path) -> None:
    """Asked as argcomplete's functions of bash, zsh and fish ask; torch is not imported for it."""
    given = {
        "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "|", "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "found"),
        "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9",
    }  # fmt: skip
    package = line.split()[0].replace("-", "_")
    code = f"import {package}.cli, sys; sys.modules['torch'] = None; {package}.cli.main([])"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **given}, check=True, timeout=HANGS)
    found = {word.strip() for word in (tmp_path / "found").read_text().split("|")}
    assert expected <= found
    assert len(found - {"-h", "--help", "--version"}) == len(expected)
