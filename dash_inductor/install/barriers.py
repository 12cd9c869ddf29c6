"""Adds missing barriers to generated kernels that read back a tensor they have written.

A looped reduction may write a tensor in one loop and read it in the next.  Triton chooses the thread layout of each
access by itself, from dtype and surrounding code, so a thread may read an element that a thread of another warp writes.
Before torch 2.15 there is no barrier between the two (pytorch 190519, triton 10924): a data race, in which the thread
may read stale memory.  The gradient of an RMSNorm that multiplies by its weight in fp32, as in gpt-oss, is an example.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..upstream import seams


def install(active: Callable[[], bool]) -> None:
    """Adds barriers to kernels that read back what they have written, if generated while `active()` is true."""
    seams.READ_BUFFER.wrap(lambda plain: _waiting(plain, active))


def _waiting(load: Callable[..., Any], active: Callable[[], bool]) -> Callable[..., Any]:
    """Wraps the code generation of a load so that a barrier precedes it if an earlier loop has written the tensor."""

    def load_behind_barrier(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if active():
            from ..upstream import blocks

            blocks.wait_for_stores(self, name)
        return load(self, name, *args, **kwargs)

    return load_behind_barrier
