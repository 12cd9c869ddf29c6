"""A row of a table of forwards, for which several contenders alternate at one shape, and the table of all rows."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import common
from .shapes import Shape

Results = tuple[Tensor, ...]
"""out [batch, heads, length, value dim], and a log-sum-exp."""
Run = Callable[[], Results]
Contenders = Mapping[str, Callable[[Shape, Results], Run]]
"""By name: from a shape and its tensors to a call without arguments, or an error that says why there is none."""
T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S", bound=Shape)


def flops(shape: Shape) -> float:
    """Returns the operations of the two matmuls of a forward (`Shape.flops` counts the five of a backward)."""
    d, dv = shape.head_dim, shape.value_dim
    return shape.flops * (d + dv) / (3 * d + 2 * dv)


def measure(
    shape: Shape,
    contenders: Contenders,
    facts: Callable[[Mapping[str, Run], Mapping[str, Results], Mapping[str, float]], dict[str, Any]],
    *,
    repeats: int,
    seconds: float = float("inf"),
) -> dict[str, Any]:
    """The row of a shape: TFLOP/s of each contender, then `facts`, the times, and the reasons of those that do not run.

    Args:
        facts: more columns, from the calls, their results, and their times in ms.
        repeats: calls of each contender, fewer (but at least 3) where all of them would take longer than `seconds`.
    """
    common.watchdog(120)
    tensors = shape.tensors()
    runs: dict[str, Run] = {}
    results: dict[str, Results] = {}
    reasons = {}
    for name, contender in contenders.items():
        try:
            run = contender(shape, tensors)
            results[name] = run()
            torch.cuda.synchronize()
            runs[name] = run
        except Exception as error:  # not run, supported, compiled, or out of memory
            reasons[name] = common.reason(error)
    if seconds < float("inf"):
        total = sum(common.time_ms(*runs.values(), repeats=1, warmup=1)) / 1e3
        repeats = max(3, min(repeats, int(seconds / max(total, 1e-6))))
    times = dict(zip(runs, common.time_ms(*runs.values(), repeats=repeats, warmup=min(3, repeats // 2)), strict=True))
    row: dict[str, Any] = {"shape": shape.name} | {name: flops(shape) / times[name] / 1e9 for name in times}
    row |= facts(runs, results, times) | {"ms": times, "not run": reasons}
    del runs, results, tensors
    gc.collect()
    torch.cuda.empty_cache()
    return row


def equal_calls(run: Run, expected: Results, count: int = 10) -> bool:
    """Returns whether `count` calls give the same bits as `expected`."""
    return all(all(map(torch.equal, expected, run())) for _ in range(count))


def relative_difference(out: Tensor, other: Tensor) -> float:
    return float((out.float() - other.float()).norm() / other.float().norm())


def in_parallel(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Runs `work` for each item in processes of its own, to fill Triton's cache, since a kernel takes seconds to
    compile.
    """
    workers = min(len(items), max(1, (os.cpu_count() or 2) // 2))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(work, items))


def chosen(shapes: Iterable[S], words: Sequence[str]) -> list[S]:
    """Returns the shapes whose names contain one of the words, all without words; exits if there are none."""
    found = [shape for shape in shapes if not words or any(word in shape.name for word in words)]
    if not found:
        raise SystemExit(f"no shape has one of {words} in its name; --list shows all names")
    return found


def report(name: str, rows: list[dict[str, Any]], options: dict[str, Any]) -> None:
    """Prints the table and the contenders that did not run, and writes the results file."""
    keys = dict.fromkeys(key for row in rows for key in row if key not in ("ms", "not run"))
    common.table([{key: row.get(key) for key in keys} for row in rows])
    for row in rows:
        for contender, reason in row["not run"].items():
            print(f"{row['shape']}: {contender} not run: {reason}")
    print(write(name, rows, options))


def write(name: str, rows: list[dict[str, Any]], options: dict[str, Any]) -> Path:
    """Writes the results file and returns its path."""
    return common.write(name, {"conditions": common.conditions(), "options": options, "rows": rows})
