"""Variants of attention as their authors write them: what becomes of each, with values and gradients."""

from __future__ import annotations

import pytest

from dash_inductor import explain
from dash_inductor.model.reasons import Reason

from .variant_programs import VARIANTS, Program, outcome, sample

pytestmark = pytest.mark.usefixtures("deterministic")

PROGRAMS = 10
"""Programs of a seed; one seed is run always, the others when all tests are run."""


def check(program: Program) -> None:
    """Values and gradients are right, and the records say what `VARIANTS` expects."""
    records, error = outcome(program)
    assert error <= 1, program
    kept = VARIANTS[program.name].kept
    assert {record.status for record in records if record.status != "replaced"} == ({"fallback"} if kept else set())
    for record in records:
        if record.status == "replaced":
            continue
        assert record.reason in (Reason.UNSUPPORTED_OP, Reason.PROBABILITIES_USED), f"{program}: {record.detail}"
        assert any(words in record.detail for words in kept), f"{program}: {record.detail}"


@pytest.mark.parametrize("name", VARIANTS)
def test_training(name: str) -> None:
    check(Program(name, "float32", dynamic=False, trained=True))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2, 3))])
def test_dtypes_dynamic_lengths_and_inference(seed: int) -> None:
    """Run all by ``python -m tests.frontends.variant_programs``."""
    for program in sample(PROGRAMS, seed):
        check(program)


@pytest.mark.parametrize("name", VARIANTS)
def test_on_an_h100(name: str) -> None:
    """The same are replaced as on the CPU."""
    variant = VARIANTS[name]
    found = explain(variant.function, *Program(name, "bfloat16", dynamic=False, trained=True).inputs(128), arch="sm_90")
    records = [site.record for site in found.sites]
    assert records
    assert any(record.status != "replaced" for record in records) == bool(variant.kept)
    for record in records:
        assert record.status == "replaced" or any(words in record.detail for words in variant.kept)
