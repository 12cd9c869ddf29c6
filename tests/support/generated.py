"""The code that Inductor generates for a step on the fake H100, where none of it can be loaded.

Importing this module, in a program of `support.forks.FAKE_GPU`, changes PyTorch for good.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.graph import GraphLowering

from . import mockgpu

_codes: list[str] = []


class _Generated(Exception):
    pass


def _save(code: str) -> None:
    _codes.append(code)
    if len(_codes) == 2:
        raise _Generated  # nothing can be loaded


mockgpu.fold_constants_on_cpu()
AsyncCompile.triton = lambda *args, **kwargs: None  # type: ignore[method-assign]  # a patch
torch._C._cuda_getCurrentRawStream = lambda device: 0  # type: ignore[assignment,misc]  # a patch
GraphLowering.save_output_code = staticmethod(_save)  # type: ignore[method-assign]  # a patch
torch._inductor.config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = False
torch._inductor.config.shape_padding = False  # it computes on the device
torch._functorch.config.force_non_lazy_backward_lowering = True


def codes(function: Callable[..., torch.Tensor], *args: Any) -> list[str]:
    """Of the forward of a function of fake tensors, and of its backward."""
    _codes.clear()
    torch._dynamo.reset()
    try:
        torch.compile(function, dynamic=False)(*args)
    except Exception:
        if len(_codes) < 2:
            raise
    return list(_codes)
