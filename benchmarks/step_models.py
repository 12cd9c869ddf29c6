"""Training steps of many models: default, and deterministic with dash_inductor; time and peak memory.

    python -m benchmarks.step_models [--models gpt2 bert ...] [--variants default dash] [--together 1]
    python -m benchmarks.step_models --models llama llava --padded    # texts of several lengths, with a mask

Every model and variant has a process of its own.  Those of `--together` models compile at the same time; then they are
timed, one after another, the variants of a model by turns.  Where the host is what a step waits for, processes of other
models make it slower although they do nothing, so one model at a time is what to compare.  A row says the median step
in ms, its ratio to the default, the ratio of peak memory, and whether the losses of five steps are finite.  What fails
is named and left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from subprocess import PIPE
from typing import Any

VARIANTS = ("default", "dash", "attention", "deterministic")
"""Without determinism; deterministic with dash_inductor, also for attention alone; PyTorch's own determinism."""
STEPS = 8
"""Steps of a turn."""


def child(name: str, variant: str, is_padded: bool) -> None:
    """Trains one model; every line on stdin asks for a turn."""
    import torch

    import dash_inductor

    from .whole_models import MODELS
    from .whole_models.made import padded

    torch.use_deterministic_algorithms(variant != "default", warn_only=variant == "deterministic")
    if variant in ("default", "deterministic"):
        dash_inductor.disable()
    if variant == "attention":
        dash_inductor.config.rewrites = "attention"
    torch.manual_seed(0)
    with torch.device("cuda"):
        model, inputs = MODELS[name]()
        inputs = padded(inputs) if is_padded else inputs
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    compiled = torch.compile(model)

    def step() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = compiled(**inputs)
        loss = result if isinstance(result, torch.Tensor) else result.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        losses.append(loss.item())
        return (time.perf_counter() - start) * 1e3

    losses: list[float] = []
    for _ in range(5):
        step()
    torch.cuda.reset_peak_memory_stats()
    step()
    memory = torch.cuda.max_memory_allocated() / 2**20
    print(json.dumps({"memory": memory, "finite": all(abs(loss) < 1e9 for loss in losses[:5])}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(statistics.median(step() for _ in range(STEPS))), flush=True)


class Children:
    """The processes of some models in all variants; `with` ends them."""

    def __init__(self, names: Sequence[str], variants: Sequence[str], is_padded: bool) -> None:
        command = [sys.executable, "-m", "benchmarks.step_models", *(["--padded"] if is_padded else []), "--child"]
        self.errors = {key: tempfile.TemporaryFile("w+") for key in itertools.product(names, variants)}  # noqa: SIM115
        self.running = {
            key: subprocess.Popen([*command, *key], stdin=PIPE, stdout=PIPE, stderr=errors, text=True)
            for key, errors in self.errors.items()
        }

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.kill()

    def told(self, key: tuple[str, str]) -> Any:
        """The next line that a process prints.

        Raises:
            RuntimeError: it has ended.
        """
        stdout, errors = self.running[key].stdout, self.errors[key]
        line = stdout.readline() if stdout else ""
        if not line:
            errors.seek(0)
            raise RuntimeError(f"{key}: {errors.read().strip().splitlines()[-1:]}")
        return json.loads(line)

    def turn(self, key: tuple[str, str]) -> float:
        """The median of `STEPS` steps in ms."""
        stdin = self.running[key].stdin
        assert stdin is not None
        stdin.write("turn\n")
        stdin.flush()
        return float(self.told(key))


def timed(names: Sequence[str], variants: Sequence[str], rounds: int, is_padded: bool) -> list[dict[str, Any]]:
    """The rows of models that are compiled at the same time, and then timed."""
    rows: list[dict[str, Any]] = []
    with Children(names, variants, is_padded) as children:
        ready: dict[str, dict[str, Any]] = {}
        for name in names:
            try:
                ready[name] = {variant: children.told((name, variant)) for variant in variants}
            except RuntimeError as error:
                print("failed", error, flush=True)
        for name, facts in ready.items():
            turns = [[children.turn((name, variant)) for variant in variants] for _ in range(rounds)]
            medians = [statistics.median(times) for times in zip(*turns, strict=True)]
            for variant, ms in zip(variants, medians, strict=True):
                memory, first = facts[variant]["memory"], facts[variants[0]]["memory"]
                row = {"model": name, "variant": variant, "ms": round(ms, 3), "relative": round(ms / medians[0], 3)}
                row |= {"memory_mib": round(memory), "relative_memory": round(memory / first, 3)}
                rows.append({**row, "finite": facts[variant]["finite"]})
                print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    return rows


def main() -> None:
    from .whole_models import MODELS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--variants", nargs="+", default=["default", "dash"], choices=VARIANTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--together", type=int, default=1, help="models that are in memory at the same time")
    parser.add_argument("--name", default="step_models", help="name of the results file")
    parser.add_argument("--padded", action="store_true", help="texts of several lengths")
    parser.add_argument("--child", nargs=2, metavar=("MODEL", "VARIANT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child, options.padded)
        return
    from . import common

    rows = []
    for first in range(0, len(options.models), options.together):
        rows += timed(
            options.models[first : first + options.together], options.variants, options.rounds, options.padded
        )
    print(common.write(options.name, {"conditions": common.conditions(), "options": vars(options), "rows": rows}))


if __name__ == "__main__":
    main()
