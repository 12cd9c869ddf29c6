"""Planted faults of simulated ranks: how often the guard names the right rank, how often a wrong one, and how fast.

    python -m benchmarks.simulated_job [RANKS] [--json]

Some minutes for 10 000 ranks; no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dash_guard.detectors.detector import Job
from dash_guard.detectors.slow import Slow
from dash_guard.monitor.monitor import in_own_process
from dash_guard.report.findings import Finding

from .simulated_ranks import Healthy, came, kinds, speeds

TRIALS = 15
"""Of each kind of fault."""
RANK_STEPS = 100_000_000
"""Of healthy ranks, among which nobody may be named slow."""
REPORTED = 1_000_000
"""Of healthy ranks that send all their messages to all detectors, which may name nobody."""

_RUN = 100  # steps in which the ranks of a run keep their speeds


@dataclass
class Score:
    """The outcome of the trials of one kind.

    Attributes:
        exact: trials in which only the faulty rank was named.
        wrong: trials in which another rank was named.
        trials: all trials.
        slowest: milliseconds of the longest detection.
    """

    exact: int = 0
    wrong: int = 0
    trials: int = 0
    slowest: float = field(default=0.0)

    def add(self, found: Iterable[Finding], right: set[int], slowest: float) -> None:
        """Counts a trial."""
        named = {rank for finding in found for rank in finding.ranks or itertools.chain(*finding.groups)}
        self.exact += named == right
        self.wrong += bool(named - right)
        self.trials += 1
        self.slowest = max(self.slowest, slowest)


def false_names(world: int, rank_steps: int, generator: np.random.Generator) -> int:
    """Returns how often a healthy rank is named slow in `rank_steps` steps of ranks."""
    detector, named = Slow(Job(world)), 0
    peers, of_ranks = list(range(world)), speeds(generator, world)
    for step in range(max(1, rank_steps // world)):
        if step % _RUN == 0:
            detector, of_ranks = Slow(Job(world)), speeds(generator, world)
        named += len(detector.compare(step, peers, came(generator, of_ranks)[0]))
    return named


def found_in_healthy(world: int, rank_steps: int, generator: np.random.Generator) -> list[Finding]:
    """Returns what all detectors report in `rank_steps` steps of healthy ranks, which send all kinds of messages."""
    found: list[Finding] = []
    for _ in range(max(1, rank_steps // (world * _RUN))):
        found += Healthy(world, generator).steps(min(_RUN, max(1, rank_steps // world)))
    return found


def simulate(
    world: int, trials: int = TRIALS, rank_steps: int = RANK_STEPS, of_all: int = REPORTED, seed: int = 0
) -> dict[str, Any]:
    """Runs all trials; returns the scores by kind, and the false positives."""
    generator = np.random.default_rng(seed)
    scores: dict[str, Score] = {}
    for kind, make in kinds(world, generator).items():
        scores[kind] = Score()
        for _ in range(trials):
            trial, right = make(int(generator.integers(world // 2) * 2))
            scores[kind].add(trial.found, right, trial.slowest)
    exact, all_ = sum(s.exact for s in scores.values()), sum(s.trials for s in scores.values())
    return {
        "ranks": world,
        "kinds": {kind: vars(score) for kind, score in scores.items()},
        "exact": exact / all_,
        "slowest_ms": round(max(score.slowest for score in scores.values()), 1),
        "rank_steps": max(1, rank_steps // world) * world,
        "false_names": false_names(world, rank_steps, generator),
        "rank steps": max(1, of_all // world) * world,
        "findings": [finding.sentence for finding in found_in_healthy(world, of_all, generator)],
    }


def show(world: int, as_json: bool) -> int:
    """Prints the results.

    Returns:
        The exit status: 0 if at least 98 % of the trials named exactly the right ranks, and no healthy rank was named;
            else
        1.
    """
    in_own_process()
    result = simulate(world)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print(f"{world} simulated ranks, {TRIALS} trials of each kind")
        for kind, score in result["kinds"].items():
            print(
                f"  {kind:16} named exactly {score['exact']:3} of {score['trials']}, somebody else in "
                f"{score['wrong']}, a detection takes {score['slowest']:.1f} ms at most"
            )
        print(f"  false names of slow ranks in {result['rank_steps']:.2g} steps of ranks: {result['false_names']}")
        print(f"  findings of all detectors in {result['rank steps']:.2g} steps of ranks: {len(result['findings'])}")
    return 0 if result["exact"] >= 0.98 and not result["findings"] else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ranks", nargs="?", type=int, default=10_000, help="from 8 to 100000, default 10000")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    if not 8 <= options.ranks <= 100_000:
        parser.error(f"ranks={options.ranks} is not allowed: expected a number from 8 to 100000")
    return show(options.ranks, options.json)


if __name__ == "__main__":
    sys.exit(main())
