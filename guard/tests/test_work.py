"""What a thread does is told from a thread that does nothing, whatever it is that it does or waits for."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dash_guard.process.work import Work

Until = Callable[[], bool]
LOOK = 0.15


def evaluates(until: Until, folder: Path, work: Work) -> None:
    while not until():
        work.trains()
        time.sleep(0.01)


def runs_through_lines(until: Until, folder: Path, work: Work) -> None:
    lines = "\n".join(["until() or pause()"] * 100)
    exec(compile(lines, __file__, "exec"), {"until": until, "pause": lambda: time.sleep(LOOK / 2)})


def computes(until: Until, folder: Path, work: Work) -> None:
    while not until():
        hashlib.sha256(bytes(1 << 20))


def writes(until: Until, folder: Path, work: Work) -> None:
    with (folder / "checkpoint").open("wb", buffering=0) as file:
        while not until():
            file.write(bytes(1 << 14)), time.sleep(0.02)


def sleeps(until: Until, folder: Path, work: Work) -> None:
    while not until():
        time.sleep(0.01)


def waits_for_a_lock(until: Until, folder: Path, work: Work) -> None:
    lock = threading.Lock()
    lock.acquire()
    while not until():
        lock.acquire(timeout=0.01)


def reads_what_never_comes(until: Until, folder: Path, work: Work) -> None:
    here, _ = os.pipe()
    os.set_blocking(here, True)
    threading.Thread(target=lambda: os.read(here, 1), daemon=True).start()
    while not until():
        time.sleep(0.01)


def does_work(doing: Callable[[Until, Path, Work], None], folder: Path) -> list[str]:
    """What looks at a thread that does this say after the first one."""
    ends, work = threading.Event(), Work()

    def run() -> None:
        work.trains()
        doing(ends.is_set, folder, work)

    thread = threading.Thread(target=run)
    thread.start()
    said = []
    for _ in range(9):
        time.sleep(LOOK)
        said.append(work.look(time.monotonic()))
    ends.set()
    thread.join()
    assert doing.__name__ in work.place
    return said[2:]


@pytest.mark.parametrize(
    ("doing", "kind"),
    [(evaluates, "modules"), (runs_through_lines, "stack"), (computes, "computation"), (writes, "input and output")],
)
def test_a_thread_that_works_is_busy(doing: Callable[[Until, Path, Work], None], kind: str, tmp_path: Path) -> None:
    said = does_work(doing, tmp_path)
    assert kind in said, said


@pytest.mark.parametrize("doing", [sleeps, waits_for_a_lock, reads_what_never_comes])
def test_a_thread_that_waits_is_not(doing: Callable[[Until, Path, Work], None], tmp_path: Path) -> None:
    assert set(does_work(doing, tmp_path)[-4:]) == {""}
