"""Portable kernels compiled without a GPU, and what the compiler and the assembler made of them."""

from __future__ import annotations

import functools
import os
from typing import Any
from unittest import mock

from dash_inductor.kernels.portable import standalone

from . import sass


@functools.cache
def built(kernel: standalone.Rendered, arch: str) -> tuple[dict[str, str], standalone.Resources]:
    """(TTGIR and PTX, resources) on "sm_80", "sm_90", ...

    As `standalone.compile_for`, but the assembler runs once: the report is of Triton's own run.
    """
    code, report = sass.compile_with_report(lambda: standalone.build(kernel, arch))
    used = report.registers, report.spill_stores, report.spill_loads, code.metadata.shared
    return {"ttgir": code.asm["ttgir"], "ptx": code.asm["ptx"]}, standalone.Resources(*used)


class _Enough(Exception):
    """Stops a compilation: the last stage that is wanted has been seen."""


@functools.cache
def stages(kernel: standalone.Rendered, arch: str, last: str) -> dict[str, str]:
    """The texts of a kernel's compilation by stage up to `last`, "ttgir" or "ptx"; no stage after it runs."""
    from triton.backends.nvidia.compiler import CUDABackend

    found: dict[str, str] = {}
    add_stages = CUDABackend.add_stages

    def add_watched_stages(backend: Any, stages: dict[str, Any], *args: Any) -> None:
        add_stages(backend, stages, *args)
        for name, stage in stages.items():
            stages[name] = functools.partial(watched, name, stage)

    def watched(name: str, stage: Any, source: Any, metadata: Any) -> Any:
        result = stage(source, metadata)
        found[name] = str(result)
        if name == last:
            raise _Enough
        return result

    always = mock.patch.dict(os.environ, TRITON_ALWAYS_COMPILE="1")  # else what another test has compiled is not
    with mock.patch.object(CUDABackend, "add_stages", add_watched_stages), always:
        try:
            standalone.build(kernel, arch)
        except _Enough:
            return found
    raise AssertionError(f"no stage {last!r} was run: {list(found)}")
