"""Facts about a run that can change bits, such as versions and settings; `compare` reports which of them differ."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dash_inductor.version import __version__

_MATTER = re.compile(
    r"(CUBLAS|CUDA|CUDNN|NCCL|NVIDIA|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|DASH_INDUCTOR|DASH_GUARD|OMP|MKL|KMP|GLOO)_?.*|"
    r"PTXAS_OPTIONS|DISABLE_LLVM_OPT|PYTHONHASHSEED|DASH_INDUCTOR|DASH_GUARD"
)
_DIFFER_ALWAYS = re.compile(r"DASH_GUARD.*|TORCHELASTIC_.*|.*_(DIR|FOLDER|PATH|HOME|FILE)")
_PACKAGES = ("triton", "numpy", "transformers", "accelerate", "flash-attn")


def rank_and_world() -> tuple[int, int]:
    """The rank of this process and the number of ranks, from the default process group, else RANK and WORLD_SIZE."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def facts(rank: int, world: int, every: int) -> dict[str, Any]:
    """The description of a run with which a rank's recording begins, as plain values for JSON.

    It has the rank and world size, the recording interval, the versions, the GPU and CPU, the settings, and the
    environment variables that can matter for results.

    Args:
        rank: the rank.
        world: the number of ranks.
        every: the recording interval in steps.
    """
    return {
        "rank": rank,
        "world_size": world,
        "every": every,
        "versions": _versions(),
        "gpu": _gpu(),
        "cpu": {
            "machine": platform.machine(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        },
        "settings": settings(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if _MATTER.fullmatch(name) and not _DIFFER_ALWAYS.fullmatch(name)
        },
    }


def changeable() -> dict[str, Any]:
    """The settings of this process that a program may change while it runs, without its seed; takes microseconds."""
    return settings() | {"initial_seed": None, "threads": torch.get_num_threads()}


def string_hashes() -> int:
    """A number that differs between processes in which hashes of strings do, and so the order of sets of strings."""
    return hash("string hashes")


def numerics_keys() -> tuple[str, ...]:
    """The sorted numerics keys of all attentions that this process has compiled; equal keys promise equal bits."""
    records = sys.modules.get("dash_inductor.records.records")
    if records is None:  # nothing was compiled
        return ()
    return tuple(sorted({record.plan.numerics_key for record in records.sites() if record.plan is not None}))


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "dash_inductor": __version__,
        "torch": torch.__version__,
        "torch_git": torch.version.git_version,
        "cuda": torch.version.cuda,
    }
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def _gpu() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties()
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory": properties.total_memory,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None,
        "driver": _driver(),
    }


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found.group() if found else None


def settings() -> dict[str, Any]:
    """The settings of this process that can change bits, by name."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    matmul = cuda.matmul
    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "bf16_reduced_precision_reduction": matmul.allow_bf16_reduced_precision_reduction,
        "fp16_reduced_precision_reduction": matmul.allow_fp16_reduced_precision_reduction,
        "cudnn": cudnn.enabled,
        "cudnn_tf32": cudnn.allow_tf32,
        "cudnn_benchmark": cudnn.benchmark,
        "cudnn_deterministic": cudnn.deterministic,
        "mkldnn": torch.backends.mkldnn.enabled,
        "flash_attention": cuda.flash_sdp_enabled(),
        "memory_efficient_attention": cuda.mem_efficient_sdp_enabled(),
        "math_attention": cuda.math_sdp_enabled(),
        "cudnn_attention": cuda.cudnn_sdp_enabled(),
        "flush_denormal": sys.float_info.min / 2 == 0.0,
        "default_dtype": str(torch.get_default_dtype()),
        "initial_seed": torch.initial_seed(),
    }
