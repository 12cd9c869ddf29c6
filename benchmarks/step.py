"""A whole training step of an unmodified model: default, deterministic, deterministic with dash_inductor.

    python -m benchmarks.step [--model llama] [--length 8192 --layers 8 --batch 2]
                              [--inputs plain|ones|padded|packed] [--variants default deterministic dash]
                              [--rounds 1] [--ddp 1] [--name step]

Models of transformers: Llama (causal), BERT (`--model bert --length 512 --batch 64 --inputs padded`) and GPT-2
(`--model gpt2 --length 4096 --batch 8`), both with their default dropout; and an encoder in the shape of ViT-L (full
mask; try 576 and 4096 tokens).  `--ddp 2` trains on two GPUs of this machine with DistributedDataParallel, each with a
batch of its own.

Each variant runs in a process of its own (`torch.compile`, fused AdamW, bf16, random init from a config), the variants
by turns for so many rounds: median step time, peak memory, and whether two trainings from the same start are bitwise
equal.  The dash variant also prints its sites and what the passes of dash_inductor cost at compile time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.nn.parallel import DistributedDataParallel

from . import common
from .models import INPUTS, MODELS

VARIANTS = ("default", "deterministic", "dash")


def train(options: argparse.Namespace, steps: int) -> tuple[Any, list[float], list[float], float]:
    """(model, losses, step times in ms, seconds of the first step) of one training from a fixed start."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    with torch.device("cuda"):
        model = MODELS[options.model](options.layers, options.length).to(torch.bfloat16)
    rank = dist.get_rank() if options.ddp > 1 else 0
    parallel = DistributedDataParallel(model, device_ids=[rank]) if options.ddp > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator(device="cuda").manual_seed(1 + rank)
    inputs = model.inputs(options.batch, options.length, generator, options.inputs)
    compiled = torch.compile(parallel)
    losses, times, first = [], [], 0.0
    for step in range(steps):
        common.watchdog(400)
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = compiled(**inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
        losses.append(loss.item())
        if step == 0:
            first = elapsed
        else:
            times.append(elapsed * 1e3)
    return model, losses, times[2:], first


def run_variant(variant: str, options: argparse.Namespace) -> dict[str, Any]:
    import dash_inductor

    torch.use_deterministic_algorithms(variant != "default")
    if variant != "dash":
        dash_inductor.disable()
    passes = _TimedPasses()
    torch.cuda.reset_peak_memory_stats()
    model, losses, times, first = train(options, options.steps)
    peak = torch.cuda.max_memory_allocated() / 2**30
    parameters = [p.detach().cpu() for p in model.parameters()]
    del model
    again, losses_again, _, _ = train(options, options.steps)
    pairs = zip(parameters, again.parameters(), strict=True)
    equal = losses == losses_again and all(torch.equal(a, b.detach().cpu()) for a, b in pairs)
    row = {
        "variant": variant, "step ms": statistics.median(times), "peak GiB": peak, "bitwise equal": equal,
        "first step s": first, "passes s": passes.seconds / 2, "last loss": losses[-1],
    }  # fmt: skip
    if variant == "dash":
        records = dash_inductor.sites()
        fates = Counter(f"kept: {r.reason.value}" if r.reason else f"replaced: {r.mask}" for r in records)
        row["sites"] = ", ".join(f"{count} {fate}" for fate, count in fates.items())
    return row


def run_process(rank: int, variant: str, options: argparse.Namespace, folder: str) -> None:
    """One process of a variant with DDP; the first one prints the row."""
    torch.cuda.set_device(rank)
    store = f"file://{folder}/store"
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=options.ddp)
    row = run_variant(variant, options)
    if rank == 0:
        print("ROW " + json.dumps(row), flush=True)
    dist.destroy_process_group()


def in_a_process(variant: str, options: argparse.Namespace) -> dict[str, Any]:
    """The row of a variant, measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.step", "--child", variant]
    for name in ("model", "length", "layers", "batch", "inputs", "steps", "ddp"):
        command += [f"--{name}", str(getattr(options, name))]
    # a graph from a cache would show no sites and no compile time
    environment = os.environ | ({"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"} if variant == "dash" else {})
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    found = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if not found:
        raise SystemExit(f"variant {variant} ended with exit status {done.returncode} and no result")
    row: dict[str, Any] = json.loads(found[0][4:])
    print(f"{variant}: {row['step ms']:.1f} ms a step", file=sys.stderr, flush=True)
    return row


class _TimedPasses:
    """Wall time spent in dash_inductor's matching and lowering while compiling."""

    def __init__(self) -> None:
        from dash_inductor import lowering
        from dash_inductor.lowering import backward
        from dash_inductor.rewrites import runner

        self.seconds = 0.0
        backward.attention_backward = self.timed(backward.attention_backward)
        runner.rewrite_graph = self.timed(runner.rewrite_graph)
        lowering.register()

    def timed(self, function: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return wrapper


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama", choices=list(MODELS))
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--inputs", default="plain", choices=INPUTS, help="what the data loader sends with the tokens")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--name", default="step", help="name of the results file")
    parser.add_argument("--rounds", type=int, default=1, help="how often each variant runs, by turns")
    parser.add_argument("--ddp", type=int, default=1, help="GPUs, each with a process of DistributedDataParallel")
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        if options.ddp > 1:
            with tempfile.TemporaryDirectory() as folder:
                multiprocessing.spawn(run_process, (options.child, options, folder), options.ddp)
        else:
            print("ROW " + json.dumps(run_variant(options.child, options)))
        return
    turns = [[in_a_process(variant, options) for variant in options.variants] for _ in range(options.rounds)]
    rows = [dict(found[-1]) for found in zip(*turns, strict=True)]
    for row, found in zip(rows, zip(*turns, strict=True), strict=True):
        row["step ms"] = statistics.median(one["step ms"] for one in found)
        row["bitwise equal"] = all(one["bitwise equal"] for one in found)
        print(f"{row['variant']}: {row['sites']}" if "sites" in row else row["variant"], file=sys.stderr)
    columns = [k for k in rows[-1] if k != "sites"]
    common.table([{k: row[k] for k in columns} for row in rows])
    reference = {row["variant"]: row["step ms"] for row in rows}
    if {"default", "dash"} <= set(reference):
        print(f"dash / default: {reference['dash'] / reference['default']:.3f} of the time")
    settings = {k: v for k, v in vars(options).items() if k != "child"}
    print(common.write(options.name, {"conditions": common.conditions(), "options": settings, "rows": rows}))


if __name__ == "__main__":
    main()
