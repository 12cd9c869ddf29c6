"""The properties of the machine on which plans depend: whether a device is supported, its architecture, and TF32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_asked: ContextVar[str | None] = ContextVar("dash_inductor_arch", default=None)


@contextmanager
def asked_about(arch: str) -> Iterator[None]:
    """A context manager inside which `arch_of` returns this architecture for CUDA devices; they need not exist.

    No kernels are compiled inside it (see `is_there`).
    """
    token = _asked.set(arch)
    try:
        yield
    finally:
        _asked.reset(token)


def is_there() -> bool:
    """Whether kernels compiled now, on this thread, can be launched: False inside `asked_about`."""
    return _asked.get() is None


def is_supported(device: torch.device) -> bool:
    """Whether the device is a CPU or a CUDA device; ROCm devices, which also have type "cuda", are not supported."""
    return device.type == "cpu" or (device.type == "cuda" and torch.version.hip is None)


def arch_of(device: torch.device) -> str:
    """The architecture of a device: "cpu", or the compute capability as "sm_<major><minor>", for example "sm_90"."""
    if device.type == "cpu":
        return "cpu"
    asked = _asked.get()
    if asked is not None:
        return asked
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def allow_tf32(device: torch.device) -> bool:
    """Whether the user allows fp32 matmuls to round their inputs to tf32."""
    if device.type != "cuda":
        return False
    precision = torch.backends.cuda.matmul.fp32_precision
    return precision == "tf32" if precision != "none" else torch.get_float32_matmul_precision() != "highest"
