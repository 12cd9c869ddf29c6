"""Host time of one attention backward: what a call costs before the GPU has anything to do.

    python -m benchmarks.host [--calls 1000] [--name host]

Calls on a shape so small that the GPU is never behind, in rounds of 100, each followed by a wait that is not timed.
Rows: the Hopper kernel called directly, the same through the compiled op, a replayed CUDA graph of it, and PyTorch's
FlashAttention-2 for comparison.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from dash_inductor.kernels.hopper import launch

from dash_inductor import lowering
from dash_inductor.model import Call, Mask
from dash_inductor.planning import plan as make_plan

from . import common
from .contenders import BSHD, arch, dash, flash, forward
from .shapes import CAUSAL, Shape

SHAPE = Shape("host", 1, 2, 2, 256, 128, 128, CAUSAL)
ROUND = 100


def host_us(run: Callable[[], object], calls: int) -> dict[str, float]:
    """µs per call: median and worst of the rounds' means."""
    for _ in range(20):
        run()
    means = []
    for _ in range(-(-calls // ROUND)):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(ROUND):
            run()
        means.append((time.perf_counter() - start) / ROUND * 1e6)
    torch.cuda.synchronize()
    return {"us": statistics.median(means), "worst round us": max(means)}


def graph(run: Callable[[], object]) -> Callable[[], object]:
    run()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        run()
    return captured.replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--name", default="host", help="name of the results file")
    options = parser.parse_args()
    common.watchdog(300)
    lowering.register()
    tensors = SHAPE.tensors()
    q, k, v, do = tensors
    out, lse, _, _ = forward(SHAPE, tensors)
    plan, call = make_plan(SHAPE.site(), arch()), Call(Mask(SHAPE.mask), SHAPE.scale, (BSHD,) * 3)

    def direct() -> object:
        return launch.backward(do, q, k, v, out, lse, call, plan)

    runs = {
        "direct": direct,
        "compiled": dash(SHAPE, tensors),
        "graph replay": graph(direct),
        "FlashAttention-2": flash(SHAPE, tensors),
    }
    rows = [{"call": name, **host_us(run, options.calls)} for name, run in runs.items()]
    common.table(rows)
    print(common.write(options.name, {"conditions": common.conditions(), "options": vars(options), "rows": rows}))


if __name__ == "__main__":
    main()
