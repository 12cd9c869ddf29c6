"""Threads of a generated kernel wait for one another where they read what others have written.

A kernel that sums along rows in a loop may write a tensor in one loop and read it in the next.  Triton chooses which
thread has which elements for each access by its dtype and its neighbours, so a thread may read what a thread of another
warp writes, and before torch 2.15 nothing makes it wait (pytorch 190519, triton 10924): it reads what was there before,
if it is fast enough.  The gradient of an RMSNorm that multiplies by its weight in fp32, as gpt_oss has it, is such a
kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..upstream import seams


def install(active: Callable[[], bool]) -> None:
    """Put barriers into kernels whose code is generated while `active`."""
    seams.READ_BUFFER.wrap(lambda plain: _waiting(plain, active))


def _waiting(load: Callable[..., Any], active: Callable[[], bool]) -> Callable[..., Any]:
    """Reads a tensor in a kernel, behind a barrier if an earlier loop has written it."""

    def load_behind_barrier(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if active():
            from ..upstream import blocks

            blocks.wait_for_stores(self, name)
        return load(self, name, *args, **kwargs)

    return load_behind_barrier
