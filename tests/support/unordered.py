"""The Hopper kernel with a reducer that waits for no semaphore: what the tests of determinism must not pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dash_inductor.kernels.hopper.backward import build, launch
from dash_inductor.kernels.hopper.backward.device import entry, reducer


@gluon.jit
def wait_for_first(semaphore, rank):  # type: ignore[no-untyped-def]  # a device function
    """As `wait_semaphore`, but any order will do once rank 0 has stored: sums stay right up to rounding."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred %waiting;
        .reg .b32 %seen, %least;
        min.s32 %least, $2, 1;
        FIRST:
        ld.acquire.gpu.global.b32 %seen, [$1];
        setp.lt.s32 %waiting, %seen, %least;
        @%waiting bra FIRST;
        fence.proxy.async;
        mov.b32 $0, %seen;
        }""",
        "=r,l,r",
        [semaphore, rank],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def count(semaphore, rank):  # type: ignore[no-untyped-def]  # a device function
    """As `release_semaphore`, but the semaphore counts contributions, whichever they are."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred %first;
        .reg .b32 %lane;
        cp.async.bulk.wait_group 0;
        bar.warp.sync 0xffffffff;
        mov.u32 %lane, %laneid;
        setp.eq.u32 %first, %lane, 0;
        @%first red.release.gpu.global.add.u32 [$1], 1;
        mov.b32 $0, $2;
        }""",
        "=r,l,r",
        [semaphore, rank],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@contextmanager
def unordered_adds() -> Iterator[None]:
    """Kernels built inside add to dq in any order; outside, what was built before is built anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducer, "wait_semaphore", wait_for_first)
        patch.setattr(reducer, "release_semaphore", count)
        # device functions remember the functions that they call: new ones of the same source look again
        patch.setattr(entry, "reduce", gluon.jit(reducer.reduce.fn))
        patch.setattr(build, "hopper_backward", gluon.jit(entry.hopper_backward.fn))
        _forget()
        yield
    _forget()


def _forget() -> None:
    build.kernels.cache_clear()
    launch._state.cache_clear()
