"""Lets Triton write line numbers in a form that older tools read."""

from __future__ import annotations

import re
from typing import Any

_INLINED = re.compile(r"(\.loc\s+\d+ \d+ \d+), function_name \S+, inlined_at \d+ \d+ \d+")


def install() -> None:
    """Leaves out of Triton's PTX where a function was inlined, for this process.

    Triton 3.9 adds it to each ``.loc``.  From such code, the compute-sanitizer of CUDA 13.0 reports addresses of
    instructions in place of files and lines.  Kernels from Triton's cache stay as they are.
    """
    from triton.backends.nvidia.compiler import CUDABackend

    make_ptx = CUDABackend.make_ptx

    def make_ptx_with_plain_lines(*args: Any, **kwargs: Any) -> str:
        return _INLINED.sub(r"\1", make_ptx(*args, **kwargs))

    CUDABackend.make_ptx = make_ptx_with_plain_lines
