"""Kernels that GPU tests set beside the Hopper kernel: a control that adds in any order, a kernel that holds SMs."""

from __future__ import annotations

import triton
from triton.experimental.gluon._runtime import GluonASTSource

from dash_inductor.kernels.common import compiling
from dash_inductor.kernels.hopper.backward import build
from dash_inductor.model import Band

from ....support import spinner
from ....support.hopper_builds import TILES, Case
from ....support.unordered import unordered_adds

CASE = Case((64, 64), Band(), "ascending")


def test_only_the_order_differs() -> None:
    """The control has all the adds of the kernel; only who may add next is another matter."""
    ordered = build.Kernels(CASE.specialisation()).main.asm["ptx"]
    with unordered_adds():
        unordered = build.Kernels(CASE.specialisation()).main.asm["ptx"]
    waits = unordered.count("FIRST:")
    assert waits == ordered.count("TURN:") - unordered.count("TURN:") >= 1
    assert (
        waits
        == unordered.count("red.release.gpu")
        == ordered.count("st.release.gpu") - unordered.count("st.release.gpu")
    )
    for instruction in ("wgmma.mma_async", "cp.reduce.async.bulk", "ld.acquire.gpu"):
        assert ordered.count(instruction) == unordered.count(instruction)
    assert build.Kernels(CASE.specialisation()).main.asm["ptx"] == ordered, "the control leaked"


def test_nothing_fits_beside_the_spinner() -> None:
    """The kernel that holds SMs in GPU tests compiles, and leaves no room for a CTA of the smallest variant."""
    names = {"stop": "*i32", "started": "*i32", "ROWS": "constexpr", "WORDS": "constexpr"}
    source = GluonASTSource(fn=spinner.hold, signature=names, constexprs={(2,): spinner.ROWS, (3,): spinner.WORDS})
    compiled = triton.compile(source, target=compiling.TARGET, options={"num_warps": 4})
    assert compiled.metadata.shared >= spinner.SHARED_BYTES
    smallest = min(
        build.Kernels(Case(dims, Band(), "ascending").specialisation()).main.metadata.shared for dims in TILES
    )
    assert compiled.metadata.shared + smallest > 228 << 10
