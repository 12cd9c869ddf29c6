"""`support.processes.run_together`: what a test says of programs that wait for one another."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from .support.processes import run_together

FOREVER = "import sys, time; print('waiting', flush=True); time.sleep(100)"
FAILS = "import sys, time; time.sleep(0.5); sys.exit('out of memory')"
LONG = "import sys; sys.stderr.write('x' * 1000000); print('told')"


def run(folder: Path, seconds: float = 60, **programs: str) -> dict[str, str]:
    commands = {name: (sys.executable, "-c", text) for name, text in programs.items()}
    return run_together(commands, seconds=seconds, folder=folder)


def test_what_they_print(tmp_path: Path) -> None:
    """However much they complain of."""
    assert run(tmp_path, a=LONG, b="print(1); print(2)") == {"a": "told\n", "b": "1\n2\n"}


def test_the_one_that_fails_is_named(tmp_path: Path) -> None:
    """At once, with what it said, though another one waits for it and stands first."""
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)first: was ended.*waiting.*second: exit status 1\n.*out of memory"):
        run(tmp_path, first=FOREVER, second=FAILS)
    assert time.monotonic() - began < 50


def test_those_that_do_not_end(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)first: was ended, after 1\.5 s.*waiting.*second: exit status 0\n2"):
        run(tmp_path, seconds=1.5, first=FOREVER, second="print(2)")
