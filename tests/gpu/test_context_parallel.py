"""Attention under context parallel on two GPUs: records, gradients beside double precision, and bits of 20 runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from ..support.distribution import ROOT
from ..support.processes import run_python

pytestmark = pytest.mark.gpu
PROGRAM = "import runpy, sys; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def facts_of(device: str, world: int, repeats: int, *cases: str) -> dict[str, list[dict[str, Any]]]:
    """What the program of `tests.support.context_parallel` found, by case and rank."""
    arguments = ("tests.support.context_parallel", device, str(world), str(repeats), *cases)
    no_cache = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    lines = run_python(PROGRAM, *arguments, path=ROOT, **no_cache).stdout.splitlines()
    ranks = [json.loads(line) for line in lines if line.startswith('{"')]
    assert len(ranks) == world
    return {case: [rank[case] for rank in ranks] for case in cases}


def check(found: dict[str, list[dict[str, Any]]], tolerance: float) -> None:
    """Everything is replaced, right, the same in all runs, and depends on the split of the keys alone."""
    for case, ranks in found.items():
        for facts in ranks:
            assert facts["error"] < tolerance, case
            assert facts["equal"], case
            assert {(r["status"], r["forward"].startswith("kept")) for r in facts["records"]} == {("replaced", False)}
    whole = [facts["digests"] for facts in found["two"]]
    assert whole == [facts["digests"] for facts in found["two turned"]]
    for facts in found["two apart"]:
        assert facts["digests"] == [whole[facts["rank"]][facts["group"]]]
    assert whole != [facts["digests"] for facts in found["two in order"]]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus() -> None:
    check(facts_of("cuda", 2, 20, "two", "two turned", "two apart", "two in order"), 1e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")
def test_four_gpus() -> None:
    found = facts_of("cuda", 4, 20, "two", "two turned", "two apart", "two in order", "four", "four turned")
    check(found, 1e-2)
    assert [f["digests"] for f in found["four"]] == [f["digests"] for f in found["four turned"]]
