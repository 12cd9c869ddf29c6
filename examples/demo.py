"""Train a small language model in several processes, and prove that runs with one order of additions are bitwise equal.

    python -m examples.demo [--size cpu|gpu]

Two processes train alike, and must agree in every bit.  A third one is the negative control: it adds the same numbers
in another order, and must differ, which shows that the comparison sees what a nondeterministic kernel does.  The exit
code is 0 only if all of this holds and every attention was replaced.

Without a GPU the attention runs in the reference executor; with one it runs in the kernels of the plan.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import dash_inductor

from . import compiled, training
from .one_run import Outcome
from .training import Run, Settings

RUNS: Mapping[str, Mapping[str, str]] = {
    "run 1": {},
    "run 2": {},
    "control": {"DASH_INDUCTOR_SCHEDULE": "descending"},
}
"""The processes, and what is special in their environment."""

WIDTH = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = "gpu" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--size", default=here, choices=list(training.SIZES), help=f"the model (here: {here})")
    size = parser.parse_args(argv).size
    settings = training.SIZES[size]
    print(f"dash_inductor {dash_inductor.__version__}, torch {torch.__version__}, {device_name(settings)}")
    say(
        f"A Llama with {describe(settings)} is trained for {settings.steps} steps on bytes of a text, three times, "
        "each time in a new process: runs 1 and 2 are alike and must agree in every bit. The control run computes the "
        "same sums, but dash_inductor is told to add their terms in another order (DASH_INDUCTOR_SCHEDULE=descending), "
        "as a nondeterministic kernel does by chance. It must differ: otherwise this comparison would prove nothing."
    )

    heading("Three processes")
    with tempfile.TemporaryDirectory() as folder:
        outcomes = {name: run_process(name, size, Path(folder)) for name in RUNS}
    say(why_run_2_takes_so_long(outcomes["run 1"].compiling, outcomes["run 2"].compiling))

    heading("What became of the attentions of the model")
    print(site_table(outcomes["run 1"].sites))

    heading("Losses, with all digits of fp32")
    runs = {name: outcome.run for name, outcome in outcomes.items()}
    print(loss_table(runs))

    heading("Are the runs equal, bit by bit?")
    problems = verify(runs) + unexpected(outcomes, settings.layers)
    for name, run in runs.items():
        print(f"{name:8} SHA-256 of all losses and parameters: {training.digest(run)[:32]}...")
    print(verdict(runs, problems))

    heading("What the attention of a larger model compiles to on an H100, which need not be here")
    plan, table = compiled.kernel_table(compiled.SITE, compiled.H100)
    say(
        "Hidden size 2048, 16 heads and 4 kv heads of 128, causal, sequence length 8192, batch 2, bfloat16. The plan: "
        f"kernel {plan.kernel}, schedule {plan.schedule}, forward {plan.forward}. Compiled here, its backward is:"
    )
    print(f"\n{table}\n\n{compiled.LEGEND}\n")
    say(f"All facts that can change a bit of its gradients, the numerics key, are: {plan.numerics_key}")
    print("\nHow fast it is on a GPU of yours: python -m benchmarks.site")
    return 1 if problems else 0


def run_process(name: str, size: str, folder: Path) -> Outcome:
    """Train in a new process.

    Args:
        folder: for the outcome, and for what compilers leave, which the processes share.

    Raises:
        SystemExit: the process failed; its own message is above.
    """
    environment = os.environ | {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "DASH_INDUCTOR_CPU": "reference",
        "OMP_NUM_THREADS": "1",  # tiny tensors: where the cores are busy, threads would wait for each other
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        **RUNS[name],
    }
    out = folder / f"{name}.pt"
    command = [sys.executable, "-m", "examples.one_run", "--name", name, "--size", size, "--out", str(out)]
    ended = subprocess.run(command, env=environment, check=False)
    if ended.returncode:
        raise SystemExit(f"{name} ended with exit status {ended.returncode}")
    outcome = Outcome.load(out)
    steps = max(len(outcome.run.losses) - 1, 1)
    print(
        f"{name:8} first step, with compiling: {outcome.compiling:5.1f} s;  each further step: "
        f"{outcome.stepping / steps:6.3f} s;  loss {outcome.run.losses[0]:.3f} -> {outcome.run.losses[-1]:.3f}",
        flush=True,
    )
    return outcome


def why_run_2_takes_so_long(first: float, second: float) -> str:
    """In words, why run 2 still compiles, and what it saves."""
    return (
        "Run 2 takes no compiled graph from a cache: it traces, rewrites, plans and generates its code anew, so that "
        "equal bits say that all of this repeats too. It generates the same text, for which the machine code of run 1 "
        f"is found: {second:.0f} s instead of {first:.0f} s until the first step is done. In daily use the caches of "
        "PyTorch are on, and it would load the graphs of run 1."
    )


def site_table(sites: Sequence[Mapping[str, Any]]) -> str:
    """Records of sites that differ in nothing but their place share a row."""
    rows = Counter((r["status"], r["shape"], r["mask"], decision(r), where(r["source"])) for r in sites)
    table = [("sites", "status", "shape", "mask", "kernel/schedule", "line")]
    table += [(str(count), *row) for row, count in rows.items()]
    return f"{aligned(table)}\n\n{SITES_LEGEND}"


SITES_LEGEND = """\
sites            attentions of the model, forward and backward, that have the same row
status           replaced by dash_inductor, or not
shape            batch x query heads (kv heads) x tokens x head dimension, and dtype
kernel/schedule  what runs the backward, and the order in which it adds; without a GPU that is the
                 reference executor, which computes slowly what the kernels compute
line             where the model calls attention"""


def decision(record: Mapping[str, Any]) -> str:
    """Kernel and schedule of a replaced site, the reason of one that is not replaced."""
    return "/".join(record["plan"].split("/")[:2]) if record["plan"] else str(record["reason"])


def where(source: str) -> str:
    """``file:line`` of a record's source, without folders and module path."""
    return Path(source.split(" in ")[0]).name


def aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def verify(runs: Mapping[str, Run]) -> list[str]:
    """Everything that is not as it should be: runs 1 and 2 are equal, and the control is not."""
    problems = [f"run 1 and run 2 differ: {name}" for name in training.differences(runs["run 1"], runs["run 2"])]
    if not training.differences(runs["run 1"], runs["control"]):
        problems.append("the control run, which adds in another order, has the same bits: the comparison is blind")
    return problems


def unexpected(outcomes: Mapping[str, Outcome], layers: int) -> list[str]:
    """The faults of the records: sites that were not replaced, or another number of sites than there are layers."""
    problems = []
    for name, outcome in outcomes.items():
        problems += [
            f"{name}: {r['name']} is not replaced: {r['reason']}" for r in outcome.sites if r["status"] != "replaced"
        ]
        if len(outcome.sites) != layers:
            problems.append(f"{name}: {len(outcome.sites)} attention backwards were seen, not {layers}")
    return problems


def loss_table(runs: Mapping[str, Run], lines: int = 7) -> str:
    """Losses of all runs at some steps, the first and the last included; ``*`` marks those that are not run 1's."""
    first = next(iter(runs.values())).losses
    shown = sorted({round(i * (len(first) - 1) / max(lines - 1, 1)) for i in range(lines)})
    table = [("step", *runs)]
    for i in shown:
        losses = [run.losses[i].item() for run in runs.values()]
        table.append((f"{i + 1:>4}", *(f"{loss:.9g}{'' if loss == losses[0] else ' *'}" for loss in losses)))
    return f"{aligned(table)}\n\n* not the bits of run 1"


def verdict(runs: Mapping[str, Run], problems: Sequence[str]) -> str:
    """Two sentences if all is well, else one line per problem."""
    if problems:
        return "\n".join(["NOT as it should be:", *problems])
    run = runs["run 1"]
    values = sum(parameter.numel() for parameter in run.parameters.values())
    of = len(run.losses) + len(run.parameters)
    differ = len(training.differences(run, runs["control"]))
    return (
        f"Runs 1 and 2 are bitwise equal: {len(run.losses)} losses, and {len(run.parameters)} parameter tensors with "
        f"{values:,} values.\nThe control run differs in {differ} of these {of}. Every attention was replaced."
    )


def describe(settings: Settings) -> str:
    """Model and batch in words."""
    return (
        f"{settings.layers} layers, hidden size {settings.hidden}, {settings.heads} heads and {settings.kv_heads} kv "
        f"heads ({settings.batch} sequences of {settings.length} bytes a step, "
        f"{str(settings.dtype).removeprefix('torch.')})"
    )


def device_name(settings: Settings) -> str:
    """The device that trains."""
    return torch.cuda.get_device_name() if settings.device == "cuda" else "CPU"


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


def say(text: str) -> None:
    """Print a paragraph."""
    print(textwrap.fill(text, WIDTH, break_on_hyphens=False), flush=True)


if __name__ == "__main__":
    sys.exit(main())
