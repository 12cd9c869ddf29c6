"""Whole training steps: PyTorch as a user would choose it, and with dash_inductor; time, memory, kernels and bits.

    python -m benchmarks.step [--models llama_8k encoder ...] [--variants default dash] [--rounds 5] [--name step]
    python -m benchmarks.step --models llama llava --padded    # texts of several lengths, with a mask

A step is forward, backward and fused AdamW in bf16 of a model of `benchmarks.whole_models`, compiled by
``torch.compile``.  Every model and variant has a process of its own.  The variants of a model are timed by turns, and
those of `--together` models are compiled at the same time.  Where the host is what a step waits for, processes of other
models make it slower although they do nothing: then one model at a time is what to compare.

A row has the median step in ms, its ratio to the default and to the fastest variant that is not deterministic, peak
memory, the attention's kernels in words with their TFLOP/s over visible pairs, the part of a step in which the GPU runs
no kernel ("host"), the time in which the host has queued a step ("host_ms"; "host_ms_busy" beside BUSY processes that
compute), and whether two trainings from the same start were bitwise equal.  A variant that does not run has the reason
instead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from subprocess import PIPE
from typing import Any

from .step_variants import VARIANTS
from .whole_models import LONG, MODELS

CHILD = (sys.executable, "-m", "benchmarks.step_child")
ENVIRONMENT = {"TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
"""PyTorch's cache of AOTAutograd does not look at `sdpa_kernel`, and would return the graph of another variant."""
COMPARED = ("default", "flash", "cudnn", "efficient", "deterministic", "FA4 deterministic", "dash")
"""Variants of a plain run."""


BUSY = 16
"""Processes that compute while the host's time is measured a second time."""


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keeps BUSY processes computing inside the `with` block."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


class Children:
    """The processes of models in all variants; leaving the `with` block ends them."""

    def __init__(self, names: Sequence[str], variants: Sequence[str], more: Sequence[str] = ()) -> None:
        keys = list(itertools.product(names, variants))
        self.errors = {key: tempfile.TemporaryFile("w+") for key in keys}  # noqa: SIM115
        self.running = {
            key: subprocess.Popen(
                [*CHILD, *key, *more], stdin=PIPE, stdout=PIPE, stderr=errors, text=True, env=os.environ | ENVIRONMENT
            )
            for key, errors in self.errors.items()
        }

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()

    def told(self, key: tuple[str, str]) -> Any:
        """Returns the next line of JSON that a process prints.

        Raises:
            RuntimeError: the process has ended; with the last line of its stderr.
        """
        stdout, errors = self.running[key].stdout, self.errors[key]
        assert stdout is not None
        for line in stdout:
            with suppress(ValueError):  # what a compiler says
                return json.loads(line)
        errors.seek(0)
        said = [line for line in errors.read().splitlines() if line.strip()]
        raise RuntimeError(next((line for line in reversed(said) if "Error" in line), "".join(said[-1:]))[:300])

    def ask(self, key: tuple[str, str], question: str) -> Any:
        """Returns the answer to a question of `step_child`."""
        stdin = self.running[key].stdin
        assert stdin is not None
        try:
            stdin.write(question + "\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # the answer is that it has ended
        return self.told(key)


def timed(names: Sequence[str], variants: Sequence[str], rounds: int, more: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Returns the rows of models that are compiled at the same time, and then timed."""
    rows: list[dict[str, Any]] = []
    with Children(names, variants, more) as children:
        found = {(name, variant): _first(children, name, variant) for name in names for variant in variants}
        for name in names:
            ready = [variant for variant in variants if "error" not in found[name, variant]]
            for variant in ready:
                found[name, variant]["turns"] = []
            for _, variant in itertools.product(range(rounds), ready):
                found[name, variant]["turns"].append(children.ask((name, variant), "turn"))
            for variant in ready:
                found[name, variant]["host_ms"] = children.ask((name, variant), "host")
            with busy_cores():
                for variant in ready:
                    found[name, variant]["host_ms_busy"] = children.ask((name, variant), "host")
            for variant in ready:
                found[name, variant] |= children.ask((name, variant), "kernels")
                found[name, variant]["equal"] = children.ask((name, variant), "bits")
            rows += compared(name, {variant: found[name, variant] for variant in variants})
            for row in rows[-len(variants) :]:
                print(" ".join(f"{key}={value}" for key, value in row.items() if key != "turns"), flush=True)
    return rows


def _first(children: Children, name: str, variant: str) -> dict[str, Any]:
    try:
        return dict(children.told((name, variant)))
    except RuntimeError as error:
        return {"error": str(error)}


def compared(name: str, found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows of a model, from the answers of the processes of its variants."""
    ms = {variant: statistics.median(facts["turns"]) for variant, facts in found.items() if "error" not in facts}
    free = [time for variant, time in ms.items() if not VARIANTS[variant].is_deterministic]
    attention = {made.__name__: of for made, of in LONG.items()}.get(name)
    rows = []
    for variant, facts in found.items():
        row: dict[str, Any] = {"model": name, "variant": variant}
        if "error" in facts:
            rows.append(row | {"error": facts["error"]})
            continue
        row |= {"ms": round(ms[variant], 3), "relative": _ratio(ms[variant], ms.get("default"))}
        row |= {"relative_to_best": _ratio(ms[variant], min(free, default=None))}
        row |= {"memory_mib": round(facts["memory"]), "equal": facts["equal"], "finite": facts["finite"]}
        row |= {"host": round(max(0.0, 1 - facts["busy ms"] / ms[variant]), 3), "sites": facts["sites"]}
        row |= {key: round(facts[key], 3) for key in ("host_ms", "host_ms_busy")}
        for way in ("forward", "backward"):
            row[way] = facts[way]
            row[f"{way}_ms"] = round(facts[f"{way} ms"], 3)
            if attention and facts[f"{way} ms"]:
                flops = attention.forward_flops if way == "forward" else attention.backward_flops
                row[f"{way}_tflops"] = round(flops / facts[f"{way} ms"] / 1e9, 1)
        rows.append(row | {"turns": [round(turn, 3) for turn in facts["turns"]]})
    return rows


def _ratio(ms: float, other: float | None) -> float | None:
    return None if other is None else round(ms / other, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[made.__name__ for made in LONG], choices=MODELS)
    parser.add_argument("--variants", nargs="+", default=list(COMPARED), choices=VARIANTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--together", type=int, default=1, help="models that are in memory at the same time")
    parser.add_argument("--name", default="step", help="name of the results file")
    parser.add_argument("--padded", action="store_true", help="texts of several lengths")
    options = parser.parse_args()
    from . import common

    rows: list[dict[str, Any]] = []
    for first in range(0, len(options.models), options.together):
        names = options.models[first : first + options.together]
        rows += timed(names, options.variants, options.rounds, ["--padded"] if options.padded else [])
        written = {"conditions": common.conditions(), "options": vars(options), "rows": rows}
        path = common.write(options.name, written)  # after every model: what was measured is not lost
    print(path)


if __name__ == "__main__":
    main()
