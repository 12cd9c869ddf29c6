"""A kernel that does with numbers what attention does with products: powers of scores, and their slopes."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dash_inductor.kernels.common import launcher, score
from dash_inductor.kernels.common.compiling import compile_kernel
from dash_inductor.kernels.common.device.score_gluon import Score
from dash_inductor.upstream.cuda import raw_stream
from dash_inductor.upstream.gluon import GluonASTSource

WARPS, OF_THREAD = 4, 32
COLUMNS = OF_THREAD * 32
"""Numbers of a warp: thread i has the columns i, i + 32, ..."""


@gluon.jit
def powers(s_ptr, p_ptr, slope_ptr, factor, bound, HIDES: gl.constexpr, COUNT: gl.constexpr):  # type: ignore[no-untyped-def]  # a device function
    """p, slope: fp32 of the same numbers; -inf is hidden with HIDES, if it is what was there before `begun`."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, 4, gl.SliceLayout(1, layout))
    columns = gl.arange(0, COUNT, gl.SliceLayout(0, layout))
    places = (gl.program_id(0) * 4 + gl.expand_dims(rows, 1)) * COUNT + gl.expand_dims(columns, 0)
    s = gl.load(s_ptr + places)
    score = Score(factor, bound, True, False, False)  # type: ignore[call-arg]  # of a device function
    v, far = score.begun(s, HIDES)
    if HIDES:
        v = gl.where(s == -float("inf"), s, v)
    zero = gl.zeros([4, COUNT], gl.float32, layout)
    p = score.powers(v, far, zero, HIDES)
    _, slope = score.powers_and_slopes(v, far, zero)
    gl.store(p_ptr + places, p)
    gl.store(slope_ptr + places, slope)


@functools.cache
def built(hides: bool) -> Any:
    types = {**dict.fromkeys(("s_ptr", "p_ptr", "slope_ptr"), "*fp32"), "factor": "fp32", "bound": score.BOUND}
    return compile_kernel(powers, GluonASTSource, {"HIDES": hides, "COUNT": COLUMNS}, types, {"num_warps": WARPS})


def run(s: Tensor, slope: float, factor: float, hides: bool = False) -> tuple[Tensor, Tensor]:
    """(powers, slopes) of fp32 numbers [n], n a multiple of WARPS * COLUMNS, on a GPU."""
    p, slopes = torch.empty_like(s), torch.empty_like(s)
    grid, rest = divmod(s.numel(), WARPS * COLUMNS)
    assert rest == 0
    device = s.device.index
    kernel = launcher.KernelLauncher(built(hides), grid)
    addresses = (t.data_ptr() for t in (s, p, slopes))
    launcher.launch(kernel.pack(raw_stream(device), (), *addresses, factor, (slope,)))
    return p, slopes
