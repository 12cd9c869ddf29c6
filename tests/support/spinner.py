"""A kernel that holds SMs: each CTA takes nearly all shared memory of one and spins until it is told to stop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = 3
WORDS = 16384
SHARED_BYTES = 4 * ROWS * WORDS
"""192 KiB of the 227 that an SM has for CTAs: no CTA of the backward fits beside one of these."""


@gluon.jit
def hold(stop, started, ROWS: gl.constexpr, WORDS: gl.constexpr):  # type: ignore[no-untyped-def]  # a device function
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    memory = gl.allocate_shared_memory(gl.int32, [ROWS, WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(ROWS):
        memory.index(i).store(gl.full([WORDS], i, gl.int32, layout))
    gl.atomic_add(started, 1)
    gl.inline_asm_elementwise(
        """{
        .reg .pred %stopped;
        .reg .b32 %seen;
        HELD:
        nanosleep.u32 2000;
        ld.acquire.gpu.global.b32 %seen, [$1];
        setp.ne.s32 %stopped, %seen, 0;
        @!%stopped bra HELD;
        mov.b32 $0, %seen;
        }""",
        "=r,l",
        [stop],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    gl.atomic_add(started, gl.sum(memory.index(0).load(layout), 0))  # zero: keeps the memory in use until here


@dataclass(frozen=True)
class Held:
    """A running spinner: its two words in GPU memory, its stream, and one with a higher priority to talk to it."""

    stop: Tensor
    started: Tensor
    spinning: torch.cuda.Stream
    side: torch.cuda.Stream

    def count(self) -> int:
        """CTAs that have an SM."""
        with torch.cuda.stream(self.side):
            return int(self.started.item())

    def over(self) -> bool:
        return self.spinning.query()

    def release(self) -> None:
        with torch.cuda.stream(self.side):
            self.stop.fill_(1)

    def launch(self, count: int) -> None:
        with torch.cuda.stream(self.spinning):
            hold[(count,)](self.stop, self.started, ROWS, WORDS, num_warps=4)


@contextmanager
def sms_held(count: int) -> Iterator[Held]:
    """`count` SMs are held inside.  Kernels that run inside must have run before: loading one waits for the GPU."""
    stop, started = (torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2))
    held = Held(stop, started, torch.cuda.Stream(), torch.cuda.Stream(priority=-1))
    torch.cuda.synchronize()
    held.release()
    held.count()
    held.launch(1)  # ends at once
    torch.cuda.synchronize()
    stop.zero_()
    started.zero_()
    torch.cuda.synchronize()
    held.launch(count)
    try:
        deadline = time.monotonic() + 20
        while held.count() < count:
            assert time.monotonic() < deadline, f"{held.count()} of {count} CTAs of the spinner have an SM"
        yield held
    finally:
        held.release()
        torch.cuda.synchronize()
