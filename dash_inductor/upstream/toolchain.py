"""Settings of the compiler that could change the bits of a kernel, whoever made them: set by us, or named in the key.

Triton reads environment variables, and settings in `triton.knobs`, which are the same variables, while it compiles.
Every compile is told explicitly what it can be told (`OPTIONS`); the other settings cannot be overruled for one kernel,
so `settings` names those that are in use, for numerics keys and cache keys.  Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import quote

OPTIONS: Mapping[str, bool] = {"enable_fp_fusion": True}
"""Options of every compile of a kernel: fused multiply-adds, whatever TRITON_DEFAULT_FP_FUSION says."""

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
"""Other variables that reach the machine code.  The list does not have the paths of the assembler and of libdevice,
which stand for their versions (`docs/determinism.md` says that versions change bits), the default precision of fp32
matmuls, which every matmul of the kernels is given, and variables that only print, dump or time something."""

_OFF = ("", "0", "false", "off", "no", "n")


def settings(environ: Mapping[str, str] | None = None) -> str:
    """The variables of `VARIABLES` that are in use, as ``name=value`` joined by commas; "" where none is.

    They are looked up in `environ`, by default `os.environ`.  Values are quoted as in a URL, so that they hold neither
    commas nor slashes.
    """
    variables = os.environ if environ is None else environ
    used = ((name, variables.get(name, "")) for name in VARIABLES)
    return ",".join(f"{name}={quote(value, safe='')}" for name, value in used if value.lower() not in _OFF)


def numerics() -> str:
    """What numerics keys name of the compiler: `settings`, and Triton's order of sums along an axis.

    From Triton 3.9 on, sums of rows in fp32 are added in another order: the forward has other bits at D=128 (measured
    on an H100, beside 3.6), while bits of the Hopper backward are those of 3.6.
    """
    from . import compat

    sums = "sums=triton3.9" if compat.sums_in_new_order() else ""
    return ",".join(filter(None, (settings(), sums)))
