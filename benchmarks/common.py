"""What the benchmarks share: conditions, timing, the watchdog, results files."""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def watchdog(seconds: float) -> None:
    """End the process with all stacks if it is still alive after `seconds`; calling again restarts the clock."""
    faulthandler.cancel_dump_traceback_later()
    faulthandler.dump_traceback_later(seconds, exit=True)


def conditions() -> dict[str, Any]:
    """Versions, GPU and commit, for the head of every results file; BENCHMARK_COMMIT overrides what git says."""
    import triton

    import dash_inductor

    commit = os.environ.get("BENCHMARK_COMMIT", "")
    if not commit:
        git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        commit = git.stdout.strip() if git.returncode == 0 else "unknown"
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "dash_inductor": dash_inductor.__version__,
        "commit": commit,
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cudnn"] = torch.backends.cudnn.version()
    return facts


def time_ms(*runs: Callable[[], object], repeats: int = 20, warmup: int = 3) -> list[float]:
    """Median times of one call of each on the GPU in ms; the L2 cache is cleared before each call.

    The runs take turns: a GPU at its power limit changes its clocks by several per cent within seconds, for all alike.
    The GPU sleeps for a few milliseconds first, so that the host, which takes 0.1 ms for a compiled call and more where
    other processes keep its cores busy, has queued all of it when the clock starts.
    """
    clear = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
    for run in runs:
        for _ in range(warmup):
            run()
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, spent in zip(runs, times, strict=True):
            torch.cuda._sleep(8_000_000)
            clear.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            spent.append(start.elapsed_time(end))
    return [statistics.median(spent) for spent in times]


def write(name: str, payload: dict[str, Any]) -> Path:
    """Write benchmarks/results/<name>.json and return its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(payload, indent=1) + "\n", encoding="utf-8")
    return path


def table(rows: list[dict[str, Any]], file: Any = sys.stdout) -> None:
    """Print rows of equal keys as an aligned table."""
    if not rows:
        return
    cells = [list(rows[0])] + [[_cell(v) for v in row.values()] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    for line in cells:
        print("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip(), file=file, flush=True)


def _cell(value: object) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 10
        else f"{value:.1f}"
        if isinstance(value, float)
        else str(value)
    )
