"""What the planner needs to know about the machine, and nothing else of it."""

from __future__ import annotations

import torch


def is_supported(device: torch.device) -> bool:
    """CUDA (ROCm also calls itself "cuda") or CPU."""
    return device.type == "cpu" or (device.type == "cuda" and torch.version.hip is None)


def arch_of(device: torch.device) -> str:
    """ "cpu", or the compute capability as "sm_<major><minor>", for example "sm_90"."""
    if device.type == "cpu":
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def allow_tf32(device: torch.device) -> bool:
    """Whether the user allows fp32 matmuls to round their inputs to tf32."""
    if device.type != "cuda":
        return False
    precision = torch.backends.cuda.matmul.fp32_precision
    return precision == "tf32" if precision != "none" else torch.get_float32_matmul_precision() != "highest"
