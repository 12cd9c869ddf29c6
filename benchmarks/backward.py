"""Attention backward beside what a user would pick instead, in one run on one GPU.

    python -m benchmarks.backward [--only regular:d128 gqa ...] [--columns dash ...] [--name backward] [--list]

One call from saved tensors to bf16 gradients, pre- and post-processing included.  Columns: PyTorch's deterministic FA2
(`use_deterministic_algorithms`), cuDNN (not deterministic), compiled FlexAttention (Triton), and the compiled
`dash::attention_backward` with the planner's plan; in TFLOP/s over visible pairs, half of all pairs if causal (for one
head dim 2.5 * 4 * B * H * S * S * D, half if causal).  "of regular" is dash's rate per visible tile over that of the
nearest shape of the regular table.  All calls of a row take turns.  `--only` takes shapes whose name contains one of
the words; results files of several runs can have several names.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from typing import Any

import torch

from dash_inductor import lowering
from dash_inductor.planning import plan as make_plan

from . import common
from .contenders import CONTENDERS, DETERMINISTIC, arch
from .shapes import SHAPES, Shape

REGULAR = "regular"
"""The run of dash at the nearest regular shape, among the runs of a shape."""


def prepare(shape: Shape, name: str) -> tuple[Callable[[], Any], Any, bool]:
    """(call, gradients, whether ten more calls gave the same bits) of a contender."""
    common.watchdog(120)
    deterministic = name in DETERMINISTIC

    def run() -> Any:
        torch.use_deterministic_algorithms(deterministic)
        try:
            return call()
        finally:
            torch.use_deterministic_algorithms(False)

    torch.use_deterministic_algorithms(deterministic)
    try:
        call = CONTENDERS[name](shape, shape.tensors())
    finally:
        torch.use_deterministic_algorithms(False)
    gradients = run()
    equal = deterministic and all(all(map(torch.equal, gradients, run())) for _ in range(10))
    return run, gradients, equal


def difference(gradients: dict[str, Any]) -> float | None:
    """Largest relative difference of dash's gradients to the first other contender's."""
    others = [g for name, g in gradients.items() if name != "dash"]
    if "dash" not in gradients or not others:
        return None
    pairs = zip(gradients["dash"], others[0], strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def measure(shape: Shape, columns: list[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"shape": shape.name}
    runs: dict[str, Callable[[], Any]] = {}
    gradients: dict[str, Any] = {}
    reasons = {}
    torch._dynamo.reset()
    for name in columns:
        try:
            runs[name], gradients[name], equal = prepare(shape, name)
        except (RuntimeError, ValueError) as error:  # not run, not supported, not compiled, or out of memory
            reasons[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
            row[name] = None
            continue
        if name == "dash":
            row["equal"] = equal
    near = SHAPES[shape.regular] if shape.regular is not None and "dash" in runs else None
    if near is not None:
        runs[REGULAR] = prepare(near, "dash")[0]
    times = dict(zip(runs, common.time_ms(*runs.values()), strict=True))
    row |= {name: shape.flops / times[name] / 1e9 for name in columns if name in times}
    if "dash" in times:
        row |= {f"vs {name}": times[name] / times["dash"] for name in columns if name in times and name != "dash"}
        if near is not None:
            row["of regular"] = shape.tile_flops / times["dash"] / (near.tile_flops / times[REGULAR])
        row["plan"] = str(make_plan(shape.site(), arch()))
    row |= {"difference": difference(gradients), "ms": times, "not run": reasons}
    del runs
    gc.collect()
    torch.cuda.empty_cache()
    return row


def selected(words: list[str]) -> list[Shape]:
    """The shapes whose name contains one of the words; all without words."""
    found = [shape for name, shape in SHAPES.items() if not words or any(word in name for word in words)]
    if not found:
        raise SystemExit(f"no shape has one of {words} in its name; --list shows all names")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="words, one of which a shape's name must contain")
    parser.add_argument("--columns", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--name", default="backward", help="name of the results file")
    parser.add_argument("--list", action="store_true", help="print the names of the shapes and end")
    options = parser.parse_args()
    shapes = selected(options.only)
    if options.list:
        print("\n".join(shape.name for shape in shapes))
        return
    lowering.register()
    rows = []
    for shape in shapes:
        rows.append(measure(shape, options.columns))
        print(rows[-1], flush=True)
    keys = dict.fromkeys(key for row in rows for key in row if key not in ("plan", "ms", "not run"))
    common.table([{key: row.get(key) for key in keys} for row in rows])
    for row in rows:
        for name, reason in row["not run"].items():
            print(f"{row['shape']}: {name} not run: {reason}")
    failed = [row["shape"] for row in rows if "dash" in row["not run"]]
    settings = {"only": options.only, "columns": options.columns}
    print(common.write(options.name, {"conditions": common.conditions(), "options": settings, "rows": rows}))
    if failed:
        raise SystemExit(f"dash did not run: {failed}")


if __name__ == "__main__":
    main()
