"""Places are lines of the program: not of libraries, of the guard, or of what wraps the program's functions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WRAPPER = """
def wrapped(function):
    def call(*args):
        return function(*args)
    return call

def waits(tick):
    tick()
"""

PROGRAM = """
import sys, threading, time
sys.path.insert(0, {tools!r})
import profiler_of_mine as tool
from dash_guard.process import stacks

said = []
def look():
    said.append(stacks.place())

def load():
    {line}

load = tool.wrapped(load)
threading.Thread(target=lambda: (time.sleep(0.3), look())).start()
load()
time.sleep(0.1)
print(said[0])
"""


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("time.sleep(0.6)", "load (train.py:12)"),
        ("tool.waits(lambda: time.sleep(0.6))", "load.<locals>.<lambda> (train.py:12)"),
    ],
)
def test_a_wrapper_that_lies_elsewhere_is_no_place(line: str, place: str, tmp_path: Path) -> None:
    assert said(tmp_path, line, "tools") == place


def test_a_wrapper_in_the_folder_of_the_program_is_no_place(tmp_path: Path) -> None:
    line = "tool.wrapped(time.sleep)(0.6)"
    assert said(tmp_path, line, "work") == "wrapped.<locals>.call, called by load (train.py:12)"


def said(tmp_path: Path, line: str, where: str) -> str:
    """The place of a program that waits in this line, with the wrapper in a folder."""
    for folder in ("tools", "work"):
        (tmp_path / folder).mkdir()
    (tmp_path / where / "profiler_of_mine.py").write_text(WRAPPER)
    script = tmp_path / "work" / "train.py"
    script.write_text(PROGRAM.format(tools=str(tmp_path / where), line=line))
    result = subprocess.run(
        [sys.executable, str(script)], cwd=script.parent, capture_output=True, text=True, check=True
    )
    return result.stdout.strip()
