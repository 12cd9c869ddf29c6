"""Host time of one attention: what a call costs before the GPU has anything to do.

    python -m benchmarks.host [--calls 1000] [--name host]

Calls on a shape so small that the GPU is never behind, in rounds of 100, each followed by a wait that is not timed.
Rows, all of a backward where nothing else is said:

    direct                   the Hopper kernels without PyTorch's dispatcher, with addresses that have been seen before
    allocations, launches    parts of it: its four tensors, and its three kernels as the driver takes them
    direct, new addresses    the same where every call has addresses that must be packed
    operator                 an eager call of the operator, which passes through PyTorch's dispatcher
    generated code           Inductor's code of a graph of this operator alone: checks of sizes, and the call
    whole compiled function  what `torch.compile` gives for such a function: guards, AOTAutograd and the generated code
    graph replay             a replayed CUDA graph of the direct call
    FlashAttention-2         PyTorch's operator
    forward, direct          the Hopper forward
    forward, FlashAttention-2
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._inductor.codecache import PyCodeCache

from dash_inductor import lowering
from dash_inductor.kernels.common import launcher
from dash_inductor.kernels.hopper.backward import launch
from dash_inductor.kernels.hopper.forward import launch as forward_launch
from dash_inductor.model import Call, Mask
from dash_inductor.operators import attention as ops
from dash_inductor.planning import plan as make_plan
from dash_inductor.upstream import compat

from . import common
from .contenders import BSHD, arch, aten, dash, flash, forward
from .shapes import CAUSAL, Shape

SHAPE = Shape("host", 1, 2, 2, 256, 128, 128, CAUSAL)
ROUND = 100
Run = Callable[[], object]


def host_us(run: Run, calls: int) -> dict[str, float]:
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


def graph(run: Run) -> Run:
    run()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        run()
    return captured.replay


def parts(direct: Run) -> dict[str, Run]:
    """The allocations of a call alone, and its launches alone."""
    facts: list[Any] = []
    tensors: list[Tensor] = []
    launches: list[launcher.Launch] = []
    allocate = compat.empty_cuda

    def empty(*of_tensor: Any) -> Tensor:
        facts.append(of_tensor)
        tensors.append(allocate(*of_tensor))
        return tensors[-1]

    with mock.patch.object(compat, "empty_cuda", empty), mock.patch.object(launcher, "launch", launches.extend):
        direct()

    def launch_again(memory: list[Tensor] = tensors) -> None:  # the memory that the launches write to stays alive
        launcher.launch(launches)

    return {"allocations": lambda: [compat.empty_cuda(*f) for f in facts], "launches": launch_again}


def generated(compiled: Run, *tensors: Tensor) -> Run:
    """The call in Inductor's code, of a function that is compiled here."""
    known = {id(module) for module in PyCodeCache.modules}
    compiled()
    (code,) = (module for module in PyCodeCache.modules if id(module) not in known and hasattr(module, "call"))
    return lambda: code.call([*tensors])


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
    operands = do, q, k, v, out, lse
    plan, call = make_plan(SHAPE.site(), arch()), Call(Mask(SHAPE.mask), SHAPE.scale, (BSHD,) * 3)
    forward_call = replace(call, orders=(BSHD,))
    texts = str(call), str(plan), "benchmark"
    bshd, length = [t.transpose(1, 2) for t in (q, k, v)], SHAPE.length
    queries = itertools.cycle([q, q.clone()])

    def direct(query: Tensor = q) -> object:
        return launch.backward(do, query, k, v, out, lse, call, plan)

    compiled = dash(SHAPE, tensors)
    of_code = generated(compiled, *operands)
    rows = []

    def measure(runs: dict[str, Run]) -> None:
        rows.extend({"call": name, **host_us(run, options.calls)} for name, run in runs.items())

    measure({"direct": direct, **parts(direct)})
    with mock.patch.object(launch, "PACKED", 1):
        measure({"direct, new addresses": lambda: direct(next(queries))})
    measure(
        {
            "operator": lambda: ops.attention_backward(*operands, [], *texts),
            "generated code": of_code,
            "whole compiled function": compiled,
            "graph replay": graph(direct),
            "FlashAttention-2": flash(SHAPE, tensors),
            "forward, direct": lambda: forward_launch.forward(q, k, v, forward_call),
            "forward, FlashAttention-2": lambda: aten._flash_attention_forward(
                *bshd, None, None, length, length, 0.0, True, False, scale=SHAPE.scale
            ),
        }
    )
    common.table(rows)
    print(common.write(options.name, {"conditions": common.conditions(), "options": vars(options), "rows": rows}))


if __name__ == "__main__":
    main()
