"""``dash-inductor bench``: what dash_inductor gains on this machine, beside what PyTorch has here."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .progress import Progress

NO_GPU = """\
There is no CUDA GPU here, so that none of the kernels can run. What follows compares PyTorch's CPU
kernel with the reference executor of dash_inductor, which exists for tests and is not made to be
fast: its times say nothing about a GPU, and only the last column means something.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--quick", action="store_true", help="three shapes of the backward (the default)")
    what.add_argument("--backward", action="store_true", help="the backward of 21 shapes, lengths from 1024 to 16384")
    what.add_argument("--step", action="store_true", help="a training step of a decoder with 4 layers")
    parser.add_argument(
        "--plot", metavar="FILE", type=Path, help="draw a bar chart (.png, .svg or .pdf), by matplotlib"
    )
    parser.epilog = (
        "Exit status: 1 if dash_inductor left an attention to PyTorch, or its bits were not always the same."
    )


def run(arguments: argparse.Namespace) -> int:
    import torch

    from ..bench import backward, results, step
    from ..bench.variants import PARTS
    from ..config import config

    if arguments.plot is not None:
        results.check_plot(arguments.plot)
    on_gpu = torch.cuda.is_available()
    device, repeats = ("cuda", 20) if on_gpu else ("cpu", 3)
    shapes = (backward.ALL if arguments.backward else backward.QUICK) if on_gpu else backward.ON_CPU
    facts = results.conditions()
    if not arguments.json:
        print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
        if not on_gpu:
            print(f"\n{NO_GPU}", flush=True)
    rows = []
    settings = {} if on_gpu else {"cpu": "reference"}
    with config.patch(**settings), Progress(PARTS * (1 if arguments.step else len(shapes))) as bar:
        if arguments.step:
            rows.append(step.measure(step.ON_GPU if on_gpu else step.ON_CPU, device, bar.begin, repeats=repeats))
        else:
            for shape in shapes:
                rows.append(backward.measure(shape, device, bar.begin, repeats=repeats))
    if arguments.plot is not None:
        results.plot(rows, arguments.plot)
    if arguments.json:
        print(json.dumps({"conditions": facts, "rows": [row.as_dict() for row in rows]}, indent=2))
    else:
        print(f"{results.format_table(rows)}\n\n{results.LEGEND}\n\n{results.format_chart(rows)}")
        for row in rows:
            for name, reason in row.not_run.items():
                print(f"{row.name}: {name} did not run: {reason}")
            if row.kept:
                print(f"{row.name}: left to PyTorch: {row.kept}")
    return int(any(row.failed for row in rows))
