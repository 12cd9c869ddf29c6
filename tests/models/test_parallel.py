"""Trainer, DDP, FSDP2 and tensor parallelism on the CPU: the records, and the bits of two runs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ..support.distribution import ROOT
from ..support.processes import run_python

pytest.importorskip("transformers", reason="the models come from the extra 'hf'")

PROGRAM = "import runpy, sys; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def facts_of(module: str, *arguments: str) -> list[dict[str, Any]]:
    """The output of a program of `tests.support`, one object for each process."""
    no_cache = {
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    }  # a cached graph has no record
    lines = run_python(PROGRAM, module, *arguments, path=ROOT, **no_cache).stdout.splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"sites"')]


TRAINER = {"padded": "2 causal & keys(0)", "packed": "2 causal & segments(0,0)"}


@pytest.mark.parametrize("kind", ["padded", pytest.param("packed", marks=pytest.mark.full)])
def test_trainer(kind: str) -> None:
    pytest.importorskip("accelerate")
    expected = {"sites": TRAINER[kind], "equal": True, "finite": True}
    assert facts_of("tests.support.trainer", "cpu", kind) == [expected]


@pytest.mark.parametrize(
    "case",
    ["ddp right", *(pytest.param(case, marks=pytest.mark.full) for case in ("ddp plain", "fsdp right", "heads right"))],
)
def test_two_processes(case: str) -> None:
    from ..support.parallel import BUCKETS, EXPECTED, PROCESSES

    found = facts_of("tests.support.parallel", "cpu", *case.split())
    graphs = BUCKETS if case.startswith("ddp") else 1
    facts = {"sites": EXPECTED[case], "graphs": graphs, "equal": True, "finite": True}
    assert [one | facts for one in found] == found
    assert len(found) == PROCESSES
    if case.startswith("ddp"):  # each has the sum
        assert len({one["norm"] for one in found}) == 1
