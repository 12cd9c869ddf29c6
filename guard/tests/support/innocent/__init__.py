"""Programs without a defective machine that do what a guard may take for one: `PROGRAMS`; with a fault: `FAULTS`.

``python -m guard.tests.support.innocent WORLD FOLDER NAME...`` runs them one after the other on WORLD ranks, with and
without the guard, and rank 0 writes ``FOLDER/results.json``: by name, the findings, the coverage, and on which ranks
the weights differ between the two runs.
"""

from __future__ import annotations

import functools

from . import besides, flags, models, weights
from .job import ODD, Program

PROGRAMS: dict[str, Program] = {**flags.PROGRAMS, **weights.PROGRAMS, **models.PROGRAMS, **besides.PROGRAMS}

FAULTS: dict[str, Program] = {
    "flipped average": functools.partial(weights.averaging, flips=9),
    **{
        f"broken {which}": functools.partial(models.adversarial, breaks=which)
        for which in ("generator", "discriminator")
    },
}
"""Programs of the same kinds with a fault on rank `ODD`: a bit that flips, or a layer that computes wrongly."""

__all__ = ["FAULTS", "ODD", "PROGRAMS"]
