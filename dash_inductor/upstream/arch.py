"""The facts about the machine that the planner needs, and nothing else of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_asked: ContextVar[str | None] = ContextVar("dash_inductor_arch", default=None)


@contextmanager
def asked_about(arch: str) -> Iterator[None]:
    """Let CUDA devices have this architecture in the block, and compile no kernels, which no device could run."""
    token = _asked.set(arch)
    try:
        yield
    finally:
        _asked.reset(token)


def is_there() -> bool:
    """Whether what is compiled here and now can be launched on its device."""
    return _asked.get() is None


def is_supported(device: torch.device) -> bool:
    """CUDA (ROCm also calls itself "cuda") or CPU."""
    return device.type == "cpu" or (device.type == "cuda" and torch.version.hip is None)


def arch_of(device: torch.device) -> str:
    """ "cpu", or the compute capability as "sm_<major><minor>", for example "sm_90"."""
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
