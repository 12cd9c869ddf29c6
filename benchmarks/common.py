"""The common parts of the benchmarks: conditions, timing, the watchdog, results files."""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import subprocess
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dash_inductor.version import __version__

from .timing import take_turns

RESULTS = Path(__file__).parent / "results"


class NotRun(RuntimeError):
    """A contender has no way to run a shape."""


def reason(error: Exception) -> str:
    """The type of an error, and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:200]}"


def watchdog(seconds: float) -> None:
    """End the process with all stacks if it is still alive after `seconds`; calling again restarts the clock."""
    faulthandler.cancel_dump_traceback_later()
    faulthandler.dump_traceback_later(seconds, exit=True)


def conditions() -> dict[str, Any]:
    """Versions, GPU and commit, for the head of every results file; BENCHMARK_COMMIT overrides what git says."""
    commit = os.environ.get("BENCHMARK_COMMIT", "")
    if not commit:
        git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        commit = git.stdout.strip() if git.returncode == 0 else "unknown"
    import triton

    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "dash_inductor": __version__,
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cudnn"] = torch.backends.cudnn.version()
    return facts | {"commit": commit}


def time_ms(*runs: Callable[[], object], repeats: int = 20, warmup: int = 3) -> list[float]:
    """Median times of one call of each on the GPU in ms; the runs take turns (`benchmarks.timing`)."""
    timings = take_turns(dict(enumerate(runs)), "cuda", repeats=repeats, warmup=warmup)
    return [timings[i].median for i in range(len(runs))]


def renamed(function: types.FunctionType, name: str) -> types.FunctionType:
    """A copy of a function with a code object of its own: Dynamo compiles each code object once for all functions."""
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


def write(name: str, payload: dict[str, Any]) -> Path:
    """Write benchmarks/results/<name>.json and return its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(payload, indent=1) + "\n", encoding="utf-8")
    return path


def table(rows: list[dict[str, Any]]) -> None:
    """Print rows of equal keys as an aligned table."""
    if not rows:
        return
    cells = [list(rows[0])] + [[_cell(v) for v in row.values()] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    for line in cells:
        print("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip(), flush=True)


def _cell(value: object) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 10
        else f"{value:.1f}"
        if isinstance(value, float)
        else str(value)
    )
