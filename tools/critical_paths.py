"""Writes dash_inductor/planning/critical_paths.json: simulated times of the planner's nominal problem, for every band.

    python tools/critical_paths.py [--processes 2]

A band's tile schedules on the nominal problem depend on how many q tiles it reaches on either side of the diagonal, so
there are at most 32 x 32 problems for a tile shape; all of them take half an hour on one core.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from multiprocessing import Pool
from pathlib import Path

from dash_inductor.kernels.family import Candidate
from dash_inductor.kernels.hopper.kernel_configs import CANDIDATES as HOPPER
from dash_inductor.planning import nominal
from dash_inductor.planning.nominal import ARCH, SCHEDULES, Reach

FILE = Path(nominal.__file__).with_name("critical_paths.json")


def row(task: tuple[str, Candidate, int]) -> list[float]:
    """Returns the critical paths of a schedule for all bands that reach this many q tiles below the diagonal."""
    name, candidate, below = task
    reach = nominal.farthest(candidate.dkdv)
    bands = (Reach(below, above).band(candidate.dkdv) for above in range(reach.above + 1))
    return [nominal.simulated(name, candidate, band, ARCH) for band in bands]


def tasks() -> Iterator[tuple[str, Candidate, int]]:
    for candidate, name in itertools.product(dict.fromkeys(HOPPER.values()), SCHEDULES):
        for below in range(nominal.farthest(candidate.dkdv).below + 1):
            yield name, candidate, below


def text(processes: int) -> str:
    found: dict[str, dict[str, list[str]]] = {}
    with Pool(processes) as pool:
        for (name, candidate, _), values in zip(tasks(), pool.imap(row, tasks()), strict=True):
            rows = found.setdefault(nominal.key(candidate), {}).setdefault(name, [])
            rows.append(" ".join(map(repr, values)))
    return json.dumps(found, indent=1) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1)
    FILE.write_text(text(parser.parse_args().processes))


if __name__ == "__main__":
    main()
