"""Random functions of FlexAttention: what is read of them is what they compute."""

from __future__ import annotations

import pytest

from .mod_programs import run

PROGRAMS = 120
"""Programs of a seed; one seed is run always, the others when all tests are run."""


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2, 3))])
def test_programs_are_read_rightly_or_not_replaced(seed: int) -> None:
    """Run thousands by ``python -m tests.frontends.mod_programs --programs 5000 --seed 7``."""
    outcomes, wrong = run(seed, PROGRAMS)
    assert not wrong, "\n".join(f"{program}: {error}" for program, error in wrong)
    assert outcomes["mask read"] >= 0.4 * PROGRAMS, outcomes  # a reader that keeps everything proves nothing
    assert outcomes["score read"] >= 0.12 * PROGRAMS, outcomes  # a sixth on average
    assert outcomes["score not replaced"] >= 0.05 * PROGRAMS, outcomes
