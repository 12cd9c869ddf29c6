"""A new component over a relation that there is: nothing but its class says anything about it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dash_inductor.kernels.families import FAMILIES
from dash_inductor.kernels.hopper.backward import build as backward
from dash_inductor.kernels.hopper.forward import build as forward
from dash_inductor.model import AttentionSpec, Band, Mask, Operand, Segments, Site
from dash_inductor.planning import plan

from ..interpreted.another_component import AtLeast, installed
from ..support.forks import interpreted_results
from ..support.hopper_builds import TILES
from .reference.test_scores import BATCH, DIM, KV, LENGTH, Q, check


@pytest.fixture(autouse=True)
def component() -> Iterator[None]:
    with installed():
        yield


def spec() -> AttentionSpec:
    return AttentionSpec(Mask(Band(0), AtLeast(Operand(0), Operand(1)), Segments(Operand(2), Operand(2))), DIM**-0.5)


def test_texts() -> None:
    assert str(spec().mask) == "causal & segments(2,2) & at_least(0,1)"
    assert AttentionSpec.parse(str(spec())) == spec()
    assert str(spec().traits) == "lo_at_least_segments"


def test_the_reference_against_fp64() -> None:
    generator = torch.Generator().manual_seed(0)
    q, kv = (torch.randint(0, 9, (BATCH, LENGTH), generator=generator) for _ in range(2))
    ids = (KV // 20).expand(BATCH, -1)
    shown = (kv[:, None, None] >= q[:, None, :, None]) & (ids[:, None, :, None] == ids[:, None, None]) & (Q >= KV)
    check(spec(), [q, kv, ids], shown)


def test_plans() -> None:
    site = Site("cuda", "bfloat16", 2, 4, 2, 1000, 1000, 64, 64, spec())
    assert [family.name for family in FAMILIES if family.covers(site, "sm_90")] == ["portable", "hopper"]
    assert "at_least" in plan(site, "sm_90").numerics_key


def test_hopper_kernels_compile() -> None:
    traits = spec().traits
    of = forward.Specialisation("bfloat16", 64, 64, traits, False)
    assert [form.name for form in of.layout.FORMS] == ["segment_ids", "ranks"]
    assert forward.Kernels(of).main.metadata.shared > 0
    main = backward.Kernels(backward.Specialisation("bfloat16", 64, 64, 1, "spt", traits, False, TILES[64, 64])).main
    assert main.metadata.shared > 0


CASES = [
    "causal & at_least(0,1)/scale=0.25;nn;two_pass;float32",
    "band(-9,30) & segments(2,2) & at_least(0,1)/scale=-0.3;nni;spt;float32",
]


def test_portable_kernels_and_tables_in_the_interpreter() -> None:
    lines = interpreted_results("another_component", *CASES)
    assert [line.partition(" ")[0] for line in lines[:2]] == ["tables"] * 2
    for case, line in zip(CASES, lines[2:], strict=True):
        assert max(float(word) for word in line.removeprefix(case).split()) < 5e-5, line
