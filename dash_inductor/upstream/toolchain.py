"""Compiler settings that could change the bits of a kernel: either fixed for every compile, or part of the keys.

Triton reads environment variables, and the same settings in `triton.knobs`, when it compiles.  Options that can be
passed to a compile are always passed explicitly (`OPTIONS`); the other settings cannot be overridden per kernel, so
`settings` lists those in use, for numerics keys and cache keys.  Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import quote

OPTIONS: Mapping[str, bool] = {"enable_fp_fusion": True}
"""The options of every kernel compile: fused multiply-adds are on, regardless of TRITON_DEFAULT_FP_FUSION."""

VARIABLES = (
    "ALLOW_LHS_TMEM_LAYOUT_CONVERSION",
    "DISABLE_LLVM_OPT",
    "DISABLE_MMA_V3",
    "DISABLE_MMA_V5",
    "DISABLE_PTXAS_OPT",
    "LLVM_PASS_PLUGIN_PATH",
    "PTXAS_OPTIONS",
    "TRITON_CONSAN_INIT_ALLOCATIONS",
    "TRITON_ENABLE_ASAN",
    "TRITON_ENABLE_EXPERIMENTAL_CONSAN",
    "TRITON_FORCE_DISABLE_FP_FUSION",
    "TRITON_INSTRUMENTATION_MODE",
    "TRITON_KERNEL_OVERRIDE",
    "TRITON_MOCK_PTX_VERSION",
    "TRITON_OVERRIDE_ARCH",
    "TRITON_PLUGIN_PATHS",
    "TRITON_PREFER_TMEM_16x256_LAYOUT",
)
"""Other variables that affect machine code.  Not in the list: the paths of the assembler and of libdevice, which
correspond to their versions (`docs/determinism.md` says that versions change bits); the default precision of fp32
matmuls, because every matmul in the kernels sets its own; and variables that only print, dump or time something."""

_OFF = ("", "0", "false", "off", "no", "n")


def settings(environ: Mapping[str, str] | None = None) -> str:
    """The variables of `VARIABLES` that are in use, as ``name=value`` joined by commas; "" if there are none.

    They are looked up in `environ`, by default `os.environ`.  Values are URL-quoted, so they contain neither commas nor
    slashes.
    """
    variables = os.environ if environ is None else environ
    used = ((name, variables.get(name, "")) for name in VARIABLES)
    return ",".join(f"{name}={quote(value, safe='')}" for name, value in used if value.lower() not in _OFF)


def numerics() -> str:
    """The compiler's part of numerics keys: `settings`, and Triton's summation order along an axis.

    From Triton 3.9 on, fp32 sums of rows are computed in another order: the forward has different bits at D=128
    (measured on an H100, compared with 3.6); the bits of the Hopper backward are the same as with 3.6.
    """
    from . import compat

    sums = "sums=triton3.9" if compat.sums_in_new_order() else ""
    return ",".join(filter(None, (settings(), sums)))
