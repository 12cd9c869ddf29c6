"""Attention backward beside what a user would pick instead, in one run on one GPU.

    python -m benchmarks.backward [--only regular:d128 gqa ...] [--columns dash ...] [--name backward] [--list]
    python -m benchmarks.backward --columns dash --softcap 50     # and "dash bounded": with bounded scores

One call from saved tensors to bf16 gradients, pre- and post-processing included.  Columns: PyTorch's deterministic FA2
(`use_deterministic_algorithms`), cuDNN (not deterministic), compiled FlexAttention (Triton), the compiled
`attention_backward` with the planner's plan, and where they are there FlashAttention-3 and the fork of it by the
authors of DASH (libraries that DASH_BENCHMARK_FA3 and DASH_BENCHMARK_DASH_FORK name, see docs/benchmarks.md) and
FlashAttention-4 (the package flash-attn-4, through autograd).  Rates are in TFLOP/s over visible pairs, half of all
pairs if causal (for one head dim 2.5 * 4 * B * H * S * S * D, half if causal), each with half the distance between the
quartiles of its times; "vs" is dash's rate over another's.  "of regular" is dash's rate per visible tile over its rate
at the nearest shape of the regular table.  "difference" is the largest relative difference of another contender's
gradients to dash's.  All calls of a row take turns.  `--only` takes shapes whose name contains one of the words;
results files of several runs can have several names.
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
from collections.abc import Callable
from typing import Any

import torch

from dash_inductor import lowering
from dash_inductor.planning import plan as make_plan

from . import common
from .contenders import BOUNDED, CONTENDERS, DETERMINISTIC, UNDER_ALGORITHMS, arch, bounded, versions
from .shapes import SHAPES, Shape
from .timing import take_turns

REGULAR = "regular"
"""The run of dash at the nearest regular shape, among the runs of a shape."""
WRONG = 0.01
"""Relative difference of bf16 gradients that rounding does not explain."""
ASIDE = ("plan", "ms", "quartiles", "differences", "same bits", "not run")
"""The entries of a row beside the columns of the table."""


def prepare(shape: Shape, name: str) -> tuple[Callable[[], Any], Any, bool]:
    """Returns (call, gradients, whether the contender promises equal bits and ten more calls gave them)."""
    common.watchdog(120)
    deterministic = name in UNDER_ALGORITHMS

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
    equal = name in DETERMINISTIC and all(all(map(torch.equal, gradients, run())) for _ in range(10))
    return run, gradients, equal


def differences(gradients: dict[str, Any]) -> dict[str, float]:
    """Returns the largest relative difference of each other contender's gradients to dash's, NaN if one is NaN."""
    if "dash" not in gradients:
        return {}

    def difference(others: Any) -> float:
        pairs = zip(gradients["dash"], others, strict=True)
        return float(torch.stack([(a.float() - b.float()).norm() / a.float().norm() for a, b in pairs]).max())

    return {name: difference(others) for name, others in gradients.items() if name != "dash"}


def measure(shape: Shape, columns: list[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"shape": shape.name}
    runs: dict[str, Callable[[], Any]] = {}
    gradients: dict[str, Any] = {}
    same: dict[str, bool] = {}
    reasons = {}
    torch._dynamo.reset()
    for name in columns:
        try:
            runs[name], gradients[name], equal = prepare(shape, name)
        except Exception as error:  # not run, supported, compiled, or out of memory
            reasons[name] = common.reason(error)
            row[name] = None
            continue
        if name in DETERMINISTIC:
            same[name] = equal
    if "dash" in same:
        row["equal"] = same["dash"]
    near = SHAPES[shape.regular] if shape.regular is not None and "dash" in runs else None
    if near is not None:
        runs[REGULAR] = prepare(near, "dash")[0]
    timings = take_turns(runs, "cuda")
    times = {name: timing.median for name, timing in timings.items()}
    row |= {name: shape.flops / times[name] / 1e9 for name in columns if name in times}
    if "dash" in times:
        row |= {f"vs {name}": times[name] / times["dash"] for name in columns if name in times and name != "dash"}
        if BOUNDED in times:
            row["a bound costs"] = times[BOUNDED] / times["dash"] - 1.0
        if near is not None:
            row["of regular"] = shape.tile_flops / times["dash"] / (near.tile_flops / times[REGULAR])
        row["plan"] = str(make_plan(shape.site(), arch()))
    gradients.pop(BOUNDED, None)  # of other scores
    differ = differences(gradients)
    row["difference"] = max(differ.values(), key=lambda value: (math.isnan(value), value), default=None)
    row |= {"ms": times, "quartiles": {name: (timing.low, timing.high) for name, timing in timings.items()}}
    row |= {"differences": differ, "same bits": same, "not run": reasons}
    del runs
    gc.collect()
    torch.cuda.empty_cache()
    return row


def cell(row: dict[str, Any], key: str) -> Any:
    """Formats a cell of the table; a rate is followed by half the interquartile range of its times, in percent."""
    if row.get(key) is None or key not in row["quartiles"]:
        return row.get(key)
    low, high = row["quartiles"][key]
    return f"{row[key]:.1f} ±{50 * (high - low) / row['ms'][key]:.1f}%"


def faults(rows: list[dict[str, Any]]) -> list[str]:
    """Lists rows without dash, gradients that differ from dash's, and bits that differ against a contender's
    promise.
    """
    found = []
    for row in rows:
        if "dash" in row["not run"]:
            found.append(f"{row['shape']}: dash did not run")
        for name, difference in row["differences"].items():
            if not difference < WRONG:
                found.append(f"{row['shape']}: the gradients of {name} differ from dash's by {difference:.2g}")
        found += [f"{row['shape']}: {name} is not deterministic" for name, same in row["same bits"].items() if not same]
    return found


def selected(words: list[str]) -> list[Shape]:
    """Returns the shapes whose names contain one of the words; all shapes without words."""
    found = [shape for name, shape in SHAPES.items() if not words or any(word in name for word in words)]
    if not found:
        raise SystemExit(f"no shape has one of {words} in its name; --list shows all names")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="words, one of which a shape's name must contain")
    parser.add_argument("--columns", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--name", default="backward", help="name of the results file")
    parser.add_argument("--softcap", type=float, help="a bound of scores, to be timed beside scores without one")
    parser.add_argument("--list", action="store_true", help="print the names of the shapes and end")
    options = parser.parse_args()
    if options.softcap is not None:
        CONTENDERS[BOUNDED] = functools.partial(bounded, softcap=options.softcap)
        options.columns = [*options.columns, BOUNDED]
    shapes = selected(options.only)
    if options.list:
        print("\n".join(shape.name for shape in shapes))
        return
    lowering.register()
    payload: dict[str, Any] = {"conditions": common.conditions() | {"libraries": versions()}}
    payload["options"] = {"only": options.only, "columns": options.columns, "softcap": options.softcap}
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        rows.append(measure(shape, options.columns))
        print(rows[-1], flush=True)
        written = common.write(options.name, payload | {"rows": rows})  # now, so that a run that is cut off keeps them
    keys = dict.fromkeys(key for row in rows for key in row if key not in ASIDE and row[key] is not None)
    common.table([{key: cell(row, key) for key in keys} for row in rows])
    reasons = [(name, reason) for row in rows for name, reason in row["not run"].items()]
    for name, reason in dict.fromkeys(reasons):
        where = [row["shape"] for row in rows if row["not run"].get(name) == reason]
        print(f"{name} not run{'' if len(where) == len(rows) else f' at {where}'}: {reason}")
    print(written)
    if found := faults(rows):
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
