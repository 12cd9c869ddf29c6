"""Attention forward beside what a user would pick instead, in one run on one GPU.

    python -m benchmarks.forward [--only regular:d128 gqa ...] [--variants] [--name forward] [--list]
    python -m benchmarks.forward --quick     # fewer lengths and repeats, all variants: 4 minutes of an idle GPU

One call from bf16 q, k, v to out and log-sum-exp.  Columns: the Hopper kernel ("dash", with --variants also "dash 1",
"dash 2": the other settings of `build.VARIANTS`), cuDNN, FlashAttention-2; in TFLOP/s over visible pairs, half of all
pairs if causal (for one head dim 4 * B * H * S * S * D, half if causal).  Medians; all calls of a row take turns.
"difference" is that of dash's out to the first other contender's, relative; "equal" says whether ten calls, and all
variants with the same kv tile, gave the same bits.  Results: benchmarks/results/<name>.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from dash_inductor.kernels.hopper_forward import build, launch

from . import common, turns
from .contenders import BSHD, NotRun, _window
from .shapes import CAUSAL, FULL, TOKENS, WINDOW, Shape, regular
from .turns import Contenders, Results, Run

aten = torch.ops.aten
LENGTHS, QUICK_LENGTHS = (1024, 2048, 4096, 8192, 16384), (1024, 2048, 4096, 16384)


def shapes(lengths: Sequence[int]) -> list[Shape]:
    """The regular table, then windows, grouped heads and larger head dims."""
    found = [regular(d, mask, s) for d in (128, 64) for mask in (FULL, CAUSAL) for s in lengths]
    longer = [s for s in lengths if s >= 2048]
    found += [Shape("window", TOKENS // s, 2048 // d, 2048 // d, s, d, d, WINDOW) for d in (128, 64) for s in longer]
    found += [Shape("gqa", TOKENS // s, 64, 8, s, 128, 128, CAUSAL) for s in longer]
    found += [Shape("wide", TOKENS // s, 8, 8, s, 256, 256, mask) for mask in (FULL, CAUSAL) for s in longer]
    found += [Shape("mixed", TOKENS // s, 16, 16, s, 192, 128, mask) for mask in (FULL, CAUSAL) for s in longer]
    found += [Shape("odd", 2, 16, 16, 8191, 128, 128, mask) for mask in (FULL, CAUSAL)]
    return found


def problem_of(shape: Shape, variant: int) -> build.Specialisation:
    lo, hi = shape.mask.lo is not None, shape.mask.hi is not None
    settings = build.VARIANTS[build.dims_of(shape.head_dim, shape.value_dim)][variant]
    even = shape.length % settings.block_kv == 0
    return build.Specialisation("bfloat16", *build.dims_of(shape.head_dim, shape.value_dim), lo, hi, even, variant)


def variants_of(shape: Shape, every: bool) -> range:
    return range(len(build.VARIANTS[build.dims_of(shape.head_dim, shape.value_dim)]) if every else 1)


def dash(shape: Shape, tensors: Results, variant: int = 0) -> Callable[[], Results]:
    q, k, v, _ = tensors
    return lambda: launch.forward(q, k, v, shape.mask, shape.scale, BSHD, variant=variant)


def cudnn(shape: Shape, tensors: Results) -> Callable[[], Results]:
    if shape.mask.hi is not None:
        raise NotRun("PyTorch gives cuDNN no windows")
    q, k, v, _ = tensors
    causal = shape.mask.lo is not None
    return lambda: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=shape.scale)[
        :2
    ]


def flash(shape: Shape, tensors: Results) -> Callable[[], Results]:
    """FlashAttention-2; v is padded to the head dim of q beforehand."""
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


def contenders(shape: Shape, every: bool) -> Contenders:
    ours = {
        f"dash {i}" if i else "dash": lambda shape, tensors, i=i: dash(shape, tensors, i)
        for i in variants_of(shape, every)
    }
    return ours | {"cuDNN": cudnn, "FA2": flash}


def measure(shape: Shape, every: bool, repeats: int) -> dict[str, Any]:
    def facts(runs: Mapping[str, Run], results: Mapping[str, Results], times: Mapping[str, float]) -> dict[str, Any]:
        if "dash" not in runs:
            return {}
        row: dict[str, Any] = {f"vs {name}": times[name] / times["dash"] for name in ("cuDNN", "FA2") if name in times}
        return row | {"difference": difference(results), "equal": equal(shape, runs, results)}

    return turns.measure(shape, contenders(shape, every), facts, repeats=repeats)


def difference(results: Mapping[str, Results]) -> float | None:
    others = [out for name, (out, _) in results.items() if not name.startswith("dash")]
    return turns.relative_difference(results["dash"][0], others[0]) if others else None


def equal(shape: Shape, runs: Mapping[str, Run], results: Mapping[str, Results]) -> bool:
    tile = [v.block_kv for v in build.VARIANTS[build.dims_of(shape.head_dim, shape.value_dim)]]
    alike = [results[f"dash {i}"] for i in range(1, len(tile)) if tile[i] == tile[0] and f"dash {i}" in results]
    same = all(all(map(torch.equal, results["dash"], other)) for other in alike)
    return same and turns.equal_calls(runs["dash"], results["dash"])


def compile_all(problems: list[build.Specialisation]) -> None:
    """Fill Triton's cache, several kernels at a time: one takes seconds."""
    turns.in_parallel(_compile, problems)


def _compile(problem: build.Specialisation) -> None:
    kernels = build.Kernels(problem)
    _ = kernels.prepare, kernels.main


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="words, one of which a shape's name must contain")
    parser.add_argument("--variants", action="store_true", help="time all settings of the kernel, not the used one")
    parser.add_argument("--quick", action="store_true", help="fewer lengths and repeats, all variants")
    parser.add_argument("--name", help="name of the results file: forward, or forward_quick, by default")
    parser.add_argument("--list", action="store_true", help="print the names of the shapes and end")
    options = parser.parse_args()
    every, repeats = options.variants or options.quick, 7 if options.quick else 20
    found = shapes(QUICK_LENGTHS if options.quick else LENGTHS)
    found = turns.chosen(found, options.only)
    if options.list:
        print("\n".join(shape.name for shape in found))
        return
    common.watchdog(300)
    compile_all([*dict.fromkeys(problem_of(shape, i) for shape in found for i in variants_of(shape, every))])
    rows = []
    for shape in found:
        rows.append(measure(shape, every, repeats))
        print(rows[-1], flush=True)
    settings = {"only": options.only, "variants": every, "repeats": repeats}
    turns.report(options.name or ("forward_quick" if options.quick else "forward"), rows, settings)
    wrong = [row["shape"] for row in rows if not row.get("equal")]
    if wrong:
        raise SystemExit(f"dash did not run, or not with equal bits: {wrong}")


if __name__ == "__main__":
    main()
