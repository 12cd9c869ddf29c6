"""The snippets of a page of documentation, and what a test does with each.

A comment directly above a block of code says what is to be done with it:

    <!-- snippet: run -->            run it: Python in the page's namespace, lines after `$` of a console as commands
    <!-- snippet: run exit=1 -->     the same; the last command of a console ends with this exit status
    <!-- snippet: full -->           run it only where tests that take long are run, else check it
    <!-- snippet: check -->          check what can be checked without running it: syntax, commands and their arguments
    <!-- snippet: file NAME -->      write it to a file in the page's folder
    <!-- snippet: output -->         the block above printed this, in which `...` stands for anything
    <!-- snippet: diagram -->        nothing can be run

Lines of a console that do not begin with `$` are what the command above them prints.  A comment ``<!-- snippet: setup``
holds Python, up to ``-->``, which readers do not see; `folder` is the page's folder there.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import doctest
import importlib
import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from _dash_inductor_state import BOOLEANS
from benchmarks import contenders

from .processes import HANGS

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {
    "python": ("run", "full", "check", "file"),
    "console": ("run", "full", "check"),
    "text": ("output", "diagram"),
    "json": ("check",),
    "c": ("file",),
}
"""Verdicts by language."""

_FENCE = re.compile(
    r"^(?:<!-- snippet: (?P<verdict>[^\n]*) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S
)
_SETUP = re.compile(r"^<!-- snippet: setup\n(?P<code>.*?)^-->$", re.M | re.S)


@dataclass(frozen=True)
class Snippet:
    """A block of a page: what is to be done with it (``setup`` for what readers do not see), and its line."""

    verdict: str
    argument: str
    language: str
    code: str
    line: int


def snippets(page: str) -> list[Snippet]:
    """All snippets in their order.

    Raises:
        ValueError: a block has no verdict, or one that its language does not have.
    """
    found = []
    for match in sorted([*_FENCE.finditer(page), *_SETUP.finditer(page)], key=lambda match: match.start()):
        line = 1 + page.count("\n", 0, match.start())
        if match.re is _SETUP:
            found.append(Snippet("setup", "", "python", match["code"], line))
            continue
        verdict, _, argument = (match["verdict"] or "").partition(" ")
        if verdict not in ALLOWED.get(match["language"], ()):
            raise ValueError(f"line {line}: verdict={verdict!r} is not allowed for a block of {match['language']!r}")
        found.append(Snippet(verdict, argument, match["language"], match["code"], line))
    return found


class Page:
    """Goes through the snippets of a page.

    Args:
        name: what tracebacks call it.
        folder: where its files are written and its commands run.
        full: whether what takes long is run.
    """

    def __init__(self, name: str, folder: Path, full: bool = False) -> None:
        self.name, self.folder, self.full = name, folder, full
        self.namespace: dict[str, Any] = {"__name__": "__main__", "folder": folder}
        self.printed = ""
        self.ran = False

    def go(self, snippet: Snippet) -> None:
        """Do with a snippet what its verdict says; an AssertionError says what is wrong with it."""
        if snippet.verdict == "diagram":
            return
        if snippet.verdict == "output":
            if self.ran:
                same(self.printed, snippet.code)
            return
        if snippet.verdict == "file":
            if snippet.language == "python":
                ast.parse(snippet.code)
            (self.folder / snippet.argument).write_text(snippet.code, encoding="utf-8")
            return
        self.ran = snippet.verdict in ("run", "setup") or (snippet.verdict == "full" and self.full)
        if snippet.language == "json":
            json.loads(snippet.code)
        elif snippet.language == "python":
            self._python(snippet)
        else:
            self._console(snippet)

    def _python(self, snippet: Snippet) -> None:
        code = compile("\n" * snippet.line + snippet.code, f"{self.name}.md", "exec")
        if self.ran:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, self.namespace)
            self.printed = out.getvalue()

    def _console(self, snippet: Snippet) -> None:
        commands = list(_commands(snippet.code))
        for i, (command, expected) in enumerate(commands):
            if not self.ran:
                check(command, self.folder)
                continue
            status = int(snippet.argument.removeprefix("exit=") or 0) if i == len(commands) - 1 else 0
            line = _with_this_python(command)
            done = subprocess.run(line, shell=True, cwd=self.folder, text=True, capture_output=True, timeout=HANGS)
            assert done.returncode == status, f"{command}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
            self.printed = done.stdout
            if expected:
                same(done.stdout, expected)


def same(printed: str, expected: str) -> None:
    """Assert that what was printed is what is expected, apart from blanks at the ends of lines."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output(expected, printed, flags), f"expected:\n{expected}\nprinted:\n{printed}"


def _commands(code: str) -> Iterator[tuple[str, str]]:
    """Each command of a console, with what it prints."""
    for part in re.split(r"^\$ ", code, flags=re.M)[1:]:
        command, _, printed = re.sub(r"\\\n\s*", "", part).partition("\n")
        yield command, printed


def _with_this_python(command: str) -> str:
    """The command with this interpreter, and with the console commands of packages as modules of it."""
    python = shlex.quote(sys.executable)
    command = re.sub(r"^pytest(?=\s)", rf"{python} -m pytest", command)
    command = re.sub(r"(^|\s)dash-(inductor|guard)(?=\s)", rf"\1{python} -m dash_\2", command)
    return re.sub(r"(^|\s)python(?=\s)", rf"\1{python}", command)


def check(command: str, folder: Path) -> None:
    """Assert that a command exists and accepts its arguments, without running it."""
    words = shlex.split(command, comments=True)
    while words and (match := re.fullmatch(r"([A-Z][A-Z0-9_]*)=(.*)", words[0])):
        _check_variable(match[1], match[2])
        words.pop(0)
    match words:
        case ["cd", _]:
            pass
        case ["git", "clone", url]:
            assert url in _text("pyproject.toml"), url
        case ["pip", "install", name]:
            assert f'name = "{name}"' in _text("pyproject.toml"), name
        case ["make", target, *variables]:
            makefile = _text("Makefile")
            assert re.search(rf"^{re.escape(target)}:", makefile, re.M), target
            assert all(
                re.match(r"(PYTHON|TORCH|PYTEST_ARGS|ONLY|UPGRADE|WITH)=", variable) for variable in variables
            ), variables
        case ["python", "-m", module, *arguments]:
            check_arguments(f"{module}.__main__" if module in ("dash_inductor", "dash_guard") else module, arguments)
        case ["dash-inductor" | "dash-guard" as name, *arguments]:
            check_arguments(f"{name.replace('-', '_')}.__main__", arguments)
        case ["python", script, *_]:
            assert (folder / script).exists(), f"{script} is no file of this page"
        case _:
            raise AssertionError(f"there is no check for {command!r}")


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _check_variable(name: str, value: str) -> None:
    from dash_inductor.config import SETTINGS

    known = {setting.env: setting for setting in SETTINGS.values()}
    if name == "DASH_INDUCTOR":
        assert value in BOOLEANS, value
    elif name.startswith("DASH_INDUCTOR"):
        assert known[name].value_of(value) is not None, f"{name}={value}"
    elif name.startswith("DASH_GUARD"):
        assert name in ("DASH_GUARD", "DASH_GUARD_SETTINGS", "DASH_GUARD_RECORD", "DASH_GUARD_FIRST_STEP"), name
    elif name.startswith("DASH_"):
        assert name in contenders.LIBRARIES, name
    else:
        assert name.startswith(("TORCH", "CUBLAS_", "NCCL_", "CUDA_")), name


class _Parsed(Exception):
    """The arguments of a command were accepted."""


def check_arguments(module: str, arguments: list[str]) -> None:
    """Assert that the parser of a module's `main` accepts the arguments; what comes after it does not run."""
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, *args: Any) -> None:
        parse(parser, *args)
        raise _Parsed

    main = importlib.import_module(module).main
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse_only),
        mock.patch.object(sys, "argv", [module, *arguments]),
        contextlib.redirect_stderr(io.StringIO()) as said,
    ):
        try:
            main()
        except _Parsed:
            return
        except SystemExit as end:
            raise AssertionError(f"{module} {shlex.join(arguments)}: {said.getvalue()}") from end
    raise AssertionError(f"{module} parses no arguments")
