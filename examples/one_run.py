"""One training run in a process of its own: what the demo starts three times.

python -m examples.one_run --name "run 1" --size cpu --out FILE
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import dash_inductor
from dash_inductor.records.records import SiteRecord, shape_text
from dash_inductor.upstream.fresh import every_graph_compiled

from . import training
from .training import Run


@dataclass
class Outcome:
    """The results that a run leaves for the demo.

    Attributes:
        run: its losses and final parameters.
        sites: `facts_of` every attention backward that it compiled.
        compiling: seconds until the first step was done.
        stepping: seconds of all further steps.
    """

    run: Run
    sites: list[dict[str, Any]]
    compiling: float
    stepping: float

    def save(self, path: Path) -> None:
        """Write it to a file."""
        torch.save({**vars(self), "run": vars(self.run)}, path)

    @classmethod
    def load(cls, path: Path) -> Outcome:
        """Read it from a file that `save` has written."""
        found = torch.load(path)
        return cls(**{**found, "run": Run(**found["run"])})


def train(name: str, size: str) -> Outcome:
    """Train from scratch, saying how far it is; every graph is planned and generated here, none comes from a cache."""
    torch.use_deterministic_algorithms(True)
    settings = training.SIZES[size]
    started = time.monotonic()
    first = 0.0
    print(f"{name}: compiling the model, then training", file=sys.stderr, flush=True)

    def report(done: int, loss: float) -> None:
        nonlocal first
        if done == 1:
            first = time.monotonic() - started
        if done % 10 == 0:
            print(f"{name}: {done} of {settings.steps} steps", file=sys.stderr, flush=True)

    with every_graph_compiled():
        run = training.train(settings, training.read_tokens(), report)
    sites = [facts_of(record) for record in dash_inductor.sites()]
    return Outcome(run, sites, first, time.monotonic() - started - first)


def facts_of(record: SiteRecord) -> dict[str, Any]:
    """The facts that the demo shows of a record, as plain data."""
    return {
        "name": record.name,
        "status": record.status,
        "reason": record.reason.value if record.reason else None,
        "shape": shape_text(record.site),
        "mask": record.mask,
        "plan": str(record.plan) if record.plan else None,
        "source": record.source,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True, help="what messages call the run")
    parser.add_argument("--size", required=True, choices=list(training.SIZES))
    parser.add_argument("--out", required=True, type=Path, help="where the outcome is written")
    options = parser.parse_args()
    train(options.name, options.size).save(options.out)


if __name__ == "__main__":
    main()
