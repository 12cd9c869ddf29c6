"""`support.processes.run_together`: what a test says of programs that wait for one another."""

from __future__ import annotations

import sys
import time
import types
from pathlib import Path

import pytest

from ..support import processes
from ..support.processes import HANGS, run_together

FOREVER = "import time; print('waiting', flush=True); open('waits', 'w').close(); time.sleep(10000)"
FAILS = """
import os, sys, time
while not os.path.exists("waits"):
    time.sleep(0.01)
sys.exit("out of memory")
"""
LONG = "import sys; sys.stderr.write('x' * 1000000); print('told')"
ENDS = "import os; print(2, flush=True); open('ends', 'w').write(str(os.getpid()))"


def run(folder: Path, seconds: float = HANGS, **programs: str) -> dict[str, str]:
    commands = {name: (sys.executable, "-c", text) for name, text in programs.items()}
    return run_together(commands, seconds=seconds, folder=folder)


def test_what_they_print(tmp_path: Path) -> None:
    """Programs are run, however much they complain of."""
    assert run(tmp_path, a=LONG, b="print(1); print(2)") == {"a": "told\n", "b": "1\n2\n"}


def test_the_one_that_fails_is_named(tmp_path: Path) -> None:
    """It is named with what it said, though another, which stands first, waits for it longer than the test may take."""
    with pytest.raises(AssertionError, match=r"(?s)first: was ended.*waiting.*second: exit status 1\n.*out of memory"):
        run(tmp_path, first=FOREVER, second=FAILS)


def test_those_that_do_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is over when one program waits and the other one has ended, however long they need to come so far."""

    def now() -> float:
        ends = tmp_path / "ends"
        pid = ends.read_text() if ends.exists() else ""
        over = (tmp_path / "waits").exists() and pid and not Path("/proc", pid).exists()
        return 1.5 if over else 0.0

    monkeypatch.setattr(processes, "time", types.SimpleNamespace(monotonic=now, sleep=time.sleep))
    with pytest.raises(AssertionError, match=r"(?s)first: was ended, after 1\.5 s.*waiting.*second: exit status 0\n2"):
        run(tmp_path, seconds=1.5, first=FOREVER, second=ENDS)
