"""Attention forward beside what a user would pick instead, in one run on one GPU.

    python -m benchmarks.forward [--only regular:d128 gqa ...] [--name forward] [--list]
    python -m benchmarks.forward --quick     # fewer lengths and repeats
    python -m benchmarks.forward --softcap 50     # and "dash bounded": with bounded scores

One call from bf16 q, k, v to out and log-sum-exp.  Columns: the Hopper kernel ("dash"), cuDNN, FlashAttention-2, and
FlashAttention-3 and -4 where they are there (see docs/benchmarks.md); in TFLOP/s over visible pairs, half
of all pairs if causal (for one head dim 4 * B * H * S * S * D, half if causal).  A column is empty where a contender
did not run, and the reason is said below the table.  Medians; all calls of a row take turns.  "difference" is the
relative difference of dash's out to the first other contender's; "equal" says whether ten calls gave the same bits.
Results: benchmarks/results/<name>.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from dash_inductor.kernels.hopper.forward import build, launch
from dash_inductor.model import AttentionSpec

from . import common, library, turns
from .common import NotRun
from .contenders import BOUNDED, BSHD, FA3, _window, flash4_forward, versions
from .shapes import CAUSAL, FULL, HIDDEN, TOKENS, WINDOW, Shape, regular
from .turns import Contenders, Results, Run

aten = torch.ops.aten
LENGTHS, QUICK_LENGTHS = (1024, 2048, 4096, 8192, 16384), (1024, 2048, 4096, 16384)
SHORT = (128, 256, 512)


def shapes(lengths: Sequence[int]) -> list[Shape]:
    """Returns the regular table, then short sequences, windows, grouped heads, larger head dims and few heads."""
    found = [regular(d, mask, s) for d in (128, 64) for mask in (FULL, CAUSAL) for s in lengths]
    short = [(HIDDEN // d, s, d, d, mask) for d in (128, 64) for mask in (FULL, CAUSAL) for s in SHORT]
    found += [Shape("short", TOKENS // s, heads, heads, s, *rest) for heads, s, *rest in short]
    longer = [s for s in lengths if s >= 2048]
    found += [Shape("window", TOKENS // s, 2048 // d, 2048 // d, s, d, d, WINDOW) for d in (128, 64) for s in longer]
    found += [Shape("gqa", TOKENS // s, 64, 8, s, 128, 128, CAUSAL) for s in longer]
    found += [Shape("wide", TOKENS // s, 8, 8, s, 256, 256, mask) for mask in (FULL, CAUSAL) for s in longer]
    found += [Shape("mixed", TOKENS // s, 16, 16, s, 192, 128, mask) for mask in (FULL, CAUSAL) for s in longer]
    found += [Shape("few", 1, 8, 1, 8192, 128, 128, CAUSAL), Shape("few", 1, 4, 4, 32768, 128, 128, CAUSAL)]
    found += [Shape("odd", 2, 16, 16, 8191, 128, 128, mask) for mask in (FULL, CAUSAL)]
    return found


def problem_of(shape: Shape) -> build.Specialisation:
    dims = build.tile_dims(shape.head_dim, shape.value_dim)
    even = shape.length % build.FORWARD_CONFIGS[dims].block_kv == 0
    return build.Specialisation("bfloat16", *dims, shape.spec.traits, even)


def spec_of(shape: Shape) -> AttentionSpec:
    return replace(shape.spec, orders=(BSHD,))


def dash(shape: Shape, tensors: Results) -> Callable[[], Results]:
    q, k, v, _ = tensors
    spec = spec_of(shape)
    run = launch.prepare((q, k, v), (), spec)
    return lambda: run((q, k, v, ()))


def cudnn(shape: Shape, tensors: Results) -> Callable[[], Results]:
    if shape.mask.hi is not None:
        raise NotRun("PyTorch gives cuDNN no windows")
    q, k, v, _ = tensors
    causal = shape.mask.lo is not None
    return lambda: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=shape.scale)[
        :2
    ]


def flash(shape: Shape, tensors: Results) -> Callable[[], Results]:
    """Prepares FlashAttention-2; v is padded to the head dim of q in advance."""
    q, k, v, _ = tensors
    v = F.pad(v, (0, shape.head_dim - shape.value_dim))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    s, causal = shape.length, shape.mask.lo is not None

    def run() -> Results:
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, None, None, s, s, 0.0, causal, False, scale=shape.scale, **_window(shape)
        )
        return out.transpose(1, 2)[..., : shape.value_dim], lse

    return run


def flash4(shape: Shape, tensors: Results) -> Callable[[], Results]:
    q, k, v, _ = tensors
    run = flash4_forward(shape)

    def both() -> Results:
        out, lse = run(q, k, v)
        return out.transpose(1, 2), lse

    return both


def flash3(shape: Shape, tensors: Results) -> Callable[[], Results]:
    """Prepares FlashAttention-3, in the library that `contenders.FA3` names."""
    if shape.softcap is not None:
        raise NotRun("the interface has no softcap")
    q, k, v, _ = tensors
    return library.named(FA3).forward((q, k, v), shape.mask, shape.scale, shape.name)


CONTENDERS: Contenders = {"dash": dash, "cuDNN": cudnn, "FA2": flash, "FA3": flash3, "FA4": flash4}


def bounded(softcap: float | None) -> Contenders:
    """Returns the contender `dash` with a softcap, if `--softcap` is given."""
    return {} if softcap is None else {BOUNDED: lambda shape, tensors: dash(replace(shape, softcap=softcap), tensors)}


def measure(shape: Shape, repeats: int, softcap: float | None = None) -> dict[str, Any]:
    def facts(runs: Mapping[str, Run], results: Mapping[str, Results], times: Mapping[str, float]) -> dict[str, Any]:
        if "dash" not in runs:
            return {}
        row: dict[str, Any] = {
            f"vs {name}": times[name] / times["dash"] for name in CONTENDERS if name in times and name != "dash"
        }
        equal = turns.equal_calls(runs["dash"], results["dash"])
        if BOUNDED in times:
            row["a bound costs"] = times[BOUNDED] / times["dash"] - 1.0
        return row | {"difference": difference(results), "equal": equal}

    return turns.measure(shape, {**CONTENDERS, **bounded(softcap)}, facts, repeats=repeats)


def difference(results: Mapping[str, Results]) -> float | None:
    others = [out for name, (out, _) in results.items() if name not in ("dash", BOUNDED)]
    return turns.relative_difference(results["dash"][0], others[0]) if others else None


def compile_all(problems: list[build.Specialisation]) -> None:
    """Fills Triton's cache, compiling several kernels in parallel, since each takes seconds."""
    turns.in_parallel(_compile, problems)


def _compile(problem: build.Specialisation) -> None:
    kernels = build.Kernels(problem)
    _ = kernels.prepare, kernels.main


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="words, one of which a shape's name must contain")
    parser.add_argument("--quick", action="store_true", help="fewer lengths and repeats")
    parser.add_argument("--name", help="name of the results file: forward, or forward_quick, by default")
    parser.add_argument("--softcap", type=float, help="a bound of scores, to be timed beside scores without one")
    parser.add_argument("--list", action="store_true", help="print the names of the shapes and end")
    options = parser.parse_args()
    repeats = 7 if options.quick else 20
    found = shapes(QUICK_LENGTHS if options.quick else LENGTHS)
    found = turns.chosen(found, options.only)
    if options.list:
        print("\n".join(shape.name for shape in found))
        return
    common.watchdog(300)
    caps = {None, options.softcap}
    compile_all([*dict.fromkeys(problem_of(replace(shape, softcap=cap)) for shape in found for cap in caps)])
    rows = []
    for shape in found:
        rows.append(measure(shape, repeats, options.softcap))
        print(rows[-1], flush=True)
    settings = {"only": options.only, "repeats": repeats, "softcap": options.softcap, "libraries": versions()}
    turns.report(options.name or ("forward_quick" if options.quick else "forward"), rows, settings)
    wrong = [row["shape"] for row in rows if not row.get("equal")]
    if wrong:
        raise SystemExit(f"dash did not run, or not with equal bits: {wrong}")


if __name__ == "__main__":
    main()
