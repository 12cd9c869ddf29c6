"""Graphs that take a tensor nowhere: kernels of its own device read it, and nobody else."""

from __future__ import annotations

from ..support.forks import FAKE_GPU, run_forked


def test_graphs_that_stay_and_that_leave() -> None:
    """Copies to another GPU and to the host, collectives, and operators that are not known."""
    program = "import runpy; runpy.run_module('tests.graph.devices', run_name='__main__', alter_sys=True)"
    found = run_forked(FAKE_GPU, program, "20").stdout.splitlines()
    assert [line for line in found if line.startswith("RESULT ")] == ["RESULT 37"]
