"""The negative control of the GPU tests differs from the kernel in who may add next, and in nothing else."""

from __future__ import annotations

from dash_inductor.kernels.hopper import build

from dash_inductor.schedule import Band

from .support.hopper_builds import Case
from .support.unordered import unordered_adds

CASE = Case((64, 64), Band(), "ascending")


def test_only_the_wait_differs() -> None:
    ordered = build.Kernels(CASE.problem()).main.asm["ptx"]
    with unordered_adds():
        unordered = build.Kernels(CASE.problem()).main.asm["ptx"]
    waits = unordered.count("FIRST:")
    assert waits == ordered.count("TURN:") - unordered.count("TURN:") >= 1
    assert (
        waits
        == unordered.count("red.release.gpu")
        == ordered.count("st.release.gpu") - unordered.count("st.release.gpu")
    )
    for instruction in ("wgmma.mma_async", "cp.reduce.async.bulk", "ld.acquire.gpu"):
        assert ordered.count(instruction) == unordered.count(instruction)
    assert build.Kernels(CASE.problem()).main.asm["ptx"] == ordered, "the control leaked"
