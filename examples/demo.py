"""Train a small language model twice under deterministic algorithms, and prove that both runs are bitwise equal.

    python -m examples.demo

On a machine without a GPU the attention backward runs in the reference executor; with one it runs in the kernels of the
plan, and step times are printed too.  The exit code is 0 only if everything is equal and every attention was replaced.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch._functorch.config
import torch._inductor.config
from tqdm import tqdm

import dash_inductor
from dash_inductor.config import config
from dash_inductor.observe.records import SiteRecord, format_table

from . import compiled, timing, training
from .training import Report, Run, Settings


def main() -> int:
    """Run the demo; the exit code."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS; read when CUDA starts
    torch.use_deterministic_algorithms(True)
    compile_every_graph()
    config.cpu = "reference"
    settings = training.GPU if torch.cuda.is_available() else training.CPU
    print(f"dash_inductor {dash_inductor.__version__}, torch {torch.__version__}, {device_name(settings)}")
    print(f"Llama, {describe(settings)}")
    tokens = training.read_tokens()

    heading("Two runs")
    runs = [train_with_bar(settings, tokens, f"run {number}") for number in (1, 2)]
    records = dash_inductor.sites()

    heading("Attention backwards that were compiled")
    print(format_table(records))

    heading("Losses")
    print(loss_table(*runs))

    heading("Are the runs equal?")
    problems = [f"differs: {name}" for name in training.differences(*runs)]
    problems += unexpected(records, expected=len(runs) * settings.layers)
    for number, run in enumerate(runs, 1):
        print(f"run {number}: sha256 of all losses and parameters {training.digest(run)}")
    print(verdict(runs[0], problems))

    if settings.device == "cuda":
        heading("Time of a training step")
        for mode in timing.MODES:
            print(f"{mode:40} {timing.step_ms(settings, tokens, mode):8.1f} ms")

    heading("What a model of this kind compiles to on an H100, at hidden size 2048, sequence length 8192, batch 2")
    plan, table = compiled.kernel_table(compiled.SITE, compiled.H100)
    print(f"kernel {plan.kernel}, schedule {plan.schedule}, forward {plan.forward}\n{table}")
    print(f"numerics key {plan.numerics_key}")
    return 1 if problems else 0


def compile_every_graph() -> None:
    """Take no graph from a cache: it would leave no record, and the second run shall plan and generate code itself."""
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False


def train_with_bar(settings: Settings, tokens: torch.Tensor, name: str) -> Run:
    """`training.train` with a progress bar on stderr."""
    with progress_bar(name, settings.steps) as report:
        return training.train(settings, tokens, report)


@contextmanager
def progress_bar(name: str, steps: int) -> Iterator[Report]:
    """A bar that the yielded function moves."""
    with tqdm(total=steps, desc=f"{name} (compiling)", unit="step", ncols=100) as bar:

        def report(done: int, loss: float) -> None:
            bar.set_description(name, refresh=False)
            bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            bar.update(done - bar.n)

        yield report


def unexpected(records: Sequence[SiteRecord], expected: int) -> list[str]:
    """What is wrong with the records: sites that were kept, or another number of sites than expected."""
    kept = [str(record) for record in records if record.status == "kept"]
    count = [] if len(records) == expected else [f"{len(records)} attention backwards were seen, not {expected}"]
    return kept + count


def loss_table(first: Run, second: Run, lines: int = 7) -> str:
    """Losses of both runs at some steps, the first and the last included, with all digits of fp32."""
    steps = len(first.losses)
    shown = sorted({round(i * (steps - 1) / max(lines - 1, 1)) for i in range(lines)})
    rows = [f"{i + 1:>4}  {first.losses[i].item():<11.9g}  {second.losses[i].item():.9g}" for i in shown]
    return "\n".join(["step  run 1        run 2", *rows])


def verdict(run: Run, problems: Sequence[str]) -> str:
    """One sentence if all is well, else one line per problem."""
    if problems:
        return "\n".join(["NOT as it should be:", *problems])
    values = sum(parameter.numel() for parameter in run.parameters.values())
    return (
        f"bitwise equal: {len(run.losses)} losses, and {len(run.parameters)} parameter tensors with {values:,} values; "
        "every attention backward was replaced"
    )


def describe(settings: Settings) -> str:
    """Model and batch in words."""
    return (
        f"{settings.layers} layers, hidden {settings.hidden}, {settings.heads} heads, {settings.kv_heads} kv heads, "
        f"{settings.batch} sequences of {settings.length} bytes a step, {str(settings.dtype).removeprefix('torch.')}"
    )


def device_name(settings: Settings) -> str:
    """The device that trains."""
    return torch.cuda.get_device_name() if settings.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
