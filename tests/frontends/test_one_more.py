"""Softmaxes with one more in the sum: what is replaced has the numbers of the program in double precision."""

from __future__ import annotations

import pytest

from .one_more_programs import BOUNDS, Case, is_right, outcome, sample

pytestmark = pytest.mark.usefixtures("deterministic")

PROGRAMS = 12
"""Programs of a seed; one seed is run always, the others when all tests are run."""


@pytest.mark.parametrize("wanted", ["none", "all"])
@pytest.mark.parametrize("bound", BOUNDS)
def test_what_is_subtracted(bound: str, wanted: str) -> None:
    """A maximum over queries or heads differs between the keys of a row, and leaves no softmax."""
    case = Case(bound=bound, wanted=wanted)
    records, ours, eager = outcome(case)
    assert is_right(ours, eager), case
    if bound in ("max", "amax", "detached", "clamped", "over heads and keys"):
        assert "replaced" in {record.status for record in records} or wanted == "all", case


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 6))])
def test_random_programs(seed: int) -> None:
    """Run more by ``python -m tests.frontends.one_more_programs``."""
    for case in sample(PROGRAMS, seed):
        _, ours, eager = outcome(case)
        assert is_right(ours, eager), case
