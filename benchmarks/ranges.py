"""Resampling: forward and backward of single operators, compiled, in microseconds.

    python -m benchmarks.ranges [--only bilinear antialias ...] [--name ranges] [--list]

"default" is torch.compile without deterministic algorithms, "torch" with them and without dash_inductor, "dash" with
both.  Medians; all calls of a row take turns.  "bytes" is the time of reading and writing what has to be read and
written once, at 3 TB/s.  What raises under deterministic algorithms is not timed.  Results:
benchmarks/results/ranges.json.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import dash_inductor

from . import common

RATE = 3e12
"""Bytes of an H100's memory in a second."""

Case = tuple[tuple[int, ...], torch.dtype, bool, dict[str, Any]]
"""A shape, a dtype, whether channels are last, and the arguments of `interpolate`."""
BF16, FP32 = torch.bfloat16, torch.float32
TWICE: dict[str, Any] = {"scale_factor": 2.0, "mode": "bilinear"}
CASES: dict[str, Case] = {
    "bilinear:twice": ((16, 128, 128, 128), BF16, False, TWICE),
    "bilinear:twice, smaller": ((16, 256, 64, 64), BF16, False, TWICE),
    "bilinear:twice, channels last": ((16, 128, 128, 128), BF16, True, TWICE),
    "bilinear:twice, fp32": ((8, 64, 128, 128), FP32, False, TWICE),
    "bilinear:to 300 x 300": ((8, 64, 128, 128), BF16, False, {"size": (300, 300), "mode": "bilinear"}),
    "bilinear:8 times": ((8, 19, 64, 64), BF16, False, {"scale_factor": 8.0, "mode": "bilinear"}),
    "nearest:twice": ((16, 128, 128, 128), BF16, False, {"scale_factor": 2.0, "mode": "nearest"}),
    "bicubic:twice": ((8, 64, 128, 128), BF16, False, {"scale_factor": 2.0, "mode": "bicubic"}),
    "antialias:to half": ((16, 3, 512, 512), BF16, False, {"size": (224, 224), "mode": "bilinear", "antialias": True}),
    "trilinear:twice": ((2, 32, 32, 64, 64), BF16, False, {"scale_factor": 2.0, "mode": "trilinear"}),
}


def _step(name: str, row: str, deterministic: bool) -> Callable[[], list[Tensor]]:
    """Compiles forward and backward of a case."""
    shape, dtype, last, options = CASES[row]
    leaf = torch.randn(shape, device="cuda").to(dtype)
    if last:
        leaf = leaf.contiguous(memory_format=torch.channels_last)
    leaf.requires_grad_()

    def resampled(x: Tensor) -> Tensor:
        return F.interpolate(x, **options)

    own = common.renamed(resampled, name)
    compiled = torch.compile(own, dynamic=False)
    torch.use_deterministic_algorithms(deterministic)
    grad_out = torch.randn_like(compiled(leaf))

    def run() -> list[Tensor]:
        torch.use_deterministic_algorithms(deterministic)
        try:
            out = compiled(leaf)
            return [out.detach(), *torch.autograd.grad(out, [leaf], grad_out)]
        finally:
            torch.use_deterministic_algorithms(False)

    run()
    return run


def _without_dash(row: str) -> Callable[[], list[Tensor]]:
    with dash_inductor.disabled():
        return _step("pytorch", row, True)


CONTENDERS: dict[str, Callable[[str], Callable[[], list[Tensor]]]] = {
    "default": functools.partial(_step, "default", deterministic=False),
    "torch": _without_dash,
    "dash": functools.partial(_step, "dash", deterministic=True),
}


def measure(row: str, repeats: int) -> dict[str, Any]:
    """Returns the time of each contender in microseconds, and the reasons of those that did not run."""
    common.watchdog(120)
    torch._dynamo.reset()
    steps: dict[str, Callable[[], list[Tensor]]] = {}
    reasons = {}
    for name, make in CONTENDERS.items():
        try:
            steps[name] = make(row)
        except (RuntimeError, ValueError) as error:
            reasons[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        finally:
            torch.use_deterministic_algorithms(False)
    spent = common.time_ms(*steps.values(), repeats=repeats)
    found: dict[str, Any] = {"case": row} | {name: 1e3 * ms for name, ms in zip(steps, spent, strict=True)}
    if "dash" in steps:
        first = steps["dash"]()
        read = sum(tensor.numel() * tensor.element_size() for tensor in first)
        found["bytes"] = 1e6 * 2 * read / RATE
        found["equal"] = all(torch.equal(a, b) for _ in range(10) for a, b in zip(first, steps["dash"](), strict=True))
    return found | {"not run": reasons}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="words, one of which a case's name must contain")
    parser.add_argument("--name", default="ranges", help="name of the results file")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--list", action="store_true", help="print the names of the cases and end")
    options = parser.parse_args()
    names = [name for name in CASES if not options.only or any(word in name for word in options.only)]
    if options.list:
        print("\n".join(names))
        return
    rows = []
    for name in names:
        rows.append(measure(name, options.repeats))
        print(rows[-1], flush=True)
    common.write(options.name, {**common.conditions(), "repeats": options.repeats, "rows": rows})


if __name__ == "__main__":
    main()
