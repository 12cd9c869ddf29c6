"""Names without an import of Dynamo: code that stays out of graphs, the wrapper of compiled modules, PyTorch's flag."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch._C import _set_deterministic_algorithms as set_deterministic_algorithms
from torch._compile import _disable_dynamo as not_compiled

__all__ = ["compiled_from", "not_compiled", "set_deterministic_algorithms"]


def compiled_from(module: nn.Module) -> nn.Module | None:
    """The module that `torch.compile` made this one around; None for any other module."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")  # not imported for this question
    if dynamo is None or not isinstance(module, dynamo.OptimizedModule):
        return None
    original: nn.Module = module._orig_mod
    return original
