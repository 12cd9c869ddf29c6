"""Random mask programs: what is recognised is the mask, at every length that the graph admits."""

from __future__ import annotations

import pytest

from .programs import run

PROGRAMS = 50
"""Programs of a seed; one seed is run always, the others when all tests are run."""


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2, 3))])
def test_programs_are_read_rightly_or_not_replaced(seed: int) -> None:
    """Run thousands by ``python -m tests.masks.programs --programs 5000 --seed 7``."""
    outcomes, wrong = run(seed, PROGRAMS)
    assert not wrong, "\n".join(f"{program}# {error}" for program, error in wrong)
    assert outcomes["recognised"] >= 0.08 * PROGRAMS, outcomes  # a reader that keeps everything proves nothing
    assert outcomes["recognised with data"] >= 0.04 * PROGRAMS, outcomes
    assert outcomes["invalid"] <= 0.2 * PROGRAMS, outcomes
