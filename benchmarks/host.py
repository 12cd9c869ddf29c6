"""Host time of one attention: what a call costs before the GPU has anything to do.

    python -m benchmarks.host [--calls 1000] [--name host] [--eager]

Calls on a shape so small that the GPU is never behind, in rounds of 100, each followed by a wait that is not timed.
Rows, all of a backward where nothing else is said:

    direct                   the Hopper kernels without PyTorch's dispatcher
    allocations, launches    parts of it: its four tensors, and its three kernels as the driver takes them
    direct, two queries      the same where an address differs from that of the call before
    operator                 an eager call of the operator, which passes through PyTorch's dispatcher
    generated code           Inductor's code of a graph of this operator alone: checks of sizes, and the call
    whole compiled function  what `torch.compile` gives for such a function: guards, AOTAutograd and the generated code
    graph replay             a replayed CUDA graph of the direct call
    FlashAttention-2         PyTorch's operator
    forward, direct          the Hopper forward
    forward, FlashAttention-2

With `--eager`, instead, one attention with its backward in a program that is not compiled:

    attention                our attention for such programs, causal
    its compiled function    what it calls
    SDPA                     `scaled_dot_product_attention`, by PyTorch's FlashAttention-2
    SDPA forward             the same without a gradient
    operators                the two operators alone, on one thread and without autograd
    SDPA, ours               the same with our functions in front of PyTorch's operators
    SDPA forward, ours       without a gradient
    operators, ours          and alone; it also prints how many launches of all calls had to be packed
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.codecache import PyCodeCache
from torch.nn.attention import SDPBackend, sdpa_kernel

from dash_inductor import lowering
from dash_inductor.eager import attention
from dash_inductor.eager import flash as flash_operators
from dash_inductor.eager.determinism import DETERMINISTIC
from dash_inductor.kernels.common import launcher
from dash_inductor.kernels.common.call_launches import CallLaunches
from dash_inductor.kernels.hopper.backward import launch
from dash_inductor.kernels.hopper.forward import launch as forward_launch
from dash_inductor.model import AttentionSpec, Mask
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
    """Returns host time per call in microseconds: median and maximum of the means of the rounds."""
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
    """Returns a call's allocations alone, and its launches alone, as functions to time."""
    facts: list[Any] = []
    tensors: list[Tensor] = []
    launches: list[launcher.Launch] = []
    allocate = compat.empty_cuda

    def empty(*of_tensor: Any) -> Tensor:
        facts.append(of_tensor)
        tensors.append(allocate(*of_tensor))
        return tensors[-1]

    def pack(calls: CallLaunches, stream: int, addresses: Sequence[int]) -> None:
        launches.extend(calls.packed(stream, addresses))

    with mock.patch.object(compat, "empty_cuda", empty), mock.patch.object(CallLaunches, "launch", pack):
        direct()

    def launch_again(memory: list[Tensor] = tensors) -> None:  # the memory that the launches write to stays alive
        launcher.launch(launches)

    return {"allocations": lambda: [compat.empty_cuda(*f) for f in facts], "launches": launch_again}


def generated(compiled: Run, *tensors: Tensor) -> Run:
    """Returns the call in the code that Inductor generates, for a function that is compiled here."""
    known = {id(module) for module in PyCodeCache.modules}
    compiled()
    (code,) = (module for module in PyCodeCache.modules if id(module) not in known and hasattr(module, "call"))
    return lambda: code.spec([*tensors])


def eager(measure: Callable[[dict[str, Run]], None]) -> None:
    """Measures a program that is not compiled."""
    leaves = [tensor.requires_grad_() for tensor in SHAPE.tensors()[:3]]
    grad = torch.ones_like(leaves[0])
    called: list[Run] = []
    of_kind = attention._compiled

    def noted(kind: attention.Kind) -> Callable[..., Any]:
        function = of_kind(kind)

        def run(*args: Any) -> object:
            called.append(lambda: function(*args))
            return function(*args)

        return run

    def ours() -> Tensor:
        return attention.attention(*leaves, causal=True)

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(*leaves, is_causal=True)

    def with_backward(forward: Callable[[], Any]) -> Run:
        return lambda: torch.autograd.grad(forward(), leaves, grad)

    with mock.patch.object(attention, "_compiled", noted):
        ours()
    measure({"attention": with_backward(ours)})
    with DETERMINISTIC:
        measure({"its compiled function": with_backward(called[0])})

    def alone() -> object:
        with torch.no_grad():
            return sdpa()

    def operators() -> object:
        q, k, v = (leaf.detach() for leaf in leaves)
        out, lse, cum_q, cum_k, max_q, max_k, *state, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
        saved = out, lse, cum_q, cum_k, max_q, max_k
        return aten._scaled_dot_product_flash_attention_backward(grad, q, k, v, *saved, 0.0, True, *state)

    packed: list[object] = []
    pack = launcher.KernelLauncher.pack

    def counted(self: launcher.KernelLauncher, *args: Any) -> tuple[launcher.Launch, ...]:
        packed.append(self)
        return pack(self, *args)

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        measure({"SDPA": with_backward(sdpa), "SDPA forward": alone, "operators": operators})
        handle = flash_operators.activate()
        with mock.patch.object(launcher.KernelLauncher, "pack", counted):
            measure({"SDPA, ours": with_backward(sdpa), "SDPA forward, ours": alone, "operators, ours": operators})
        handle.remove()
    print(f"{len(packed)} launches were packed")


def compiled(measure: Callable[[dict[str, Run]], None]) -> None:
    """Measures the kernels, their operator, and the functions that `torch.compile` makes around it."""
    lowering.register()
    tensors = SHAPE.tensors()
    q, k, v, do = tensors
    out, lse, _, _ = forward(SHAPE, tensors)
    operands = do, q, k, v, out, lse
    plan, spec = make_plan(SHAPE.site(), arch()), AttentionSpec(Mask(SHAPE.mask), SHAPE.scale, (BSHD,) * 3)
    forward_spec = replace(spec, orders=(BSHD,))
    texts = str(spec), str(plan), "benchmark"
    bshd, length = [t.transpose(1, 2) for t in (q, k, v)], SHAPE.length
    queries = itertools.cycle([q, q.clone()])

    run = launch.prepare(operands, (), spec, plan)
    run_forward = forward_launch.prepare((q, k, v), (), forward_spec)

    def direct(query: Tensor = q) -> object:
        return run((do, query, k, v, out, lse, ()))

    whole = dash(SHAPE, tensors)
    of_code = generated(whole, *operands)
    measure({"direct": direct, **parts(direct)})
    measure(
        {
            "direct, two queries": lambda: direct(next(queries)),
            "operator": lambda: ops.attention_backward(*operands, [], *texts),
            "generated code": of_code,
            "whole compiled function": whole,
            "graph replay": graph(direct),
            "FlashAttention-2": flash(SHAPE, tensors),
            "forward, direct": lambda: run_forward((q, k, v, ())),
            "forward, FlashAttention-2": lambda: aten._flash_attention_forward(
                *bshd, None, None, length, length, 0.0, True, False, scale=SHAPE.scale
            ),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--name", default="host", help="name of the results file")
    parser.add_argument("--eager", action="store_true", help="measure a program that is not compiled")
    options = parser.parse_args()
    common.watchdog(300)
    rows: list[dict[str, Any]] = []

    def measure(runs: dict[str, Run]) -> None:
        rows.extend({"call": name, **host_us(run, options.calls)} for name, run in runs.items())

    (eager if options.eager else compiled)(measure)
    common.table(rows)
    print(common.write(options.name, {"conditions": common.conditions(), "options": vars(options), "rows": rows}))


if __name__ == "__main__":
    main()
