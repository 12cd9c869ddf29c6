"""Modules that PyTorch's composable functions have changed."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def composable_ddp(module: nn.Module) -> DistributedDataParallel | None:
    """The replica that `replicate` has made of a module, after its first forward; None for any other module."""
    composable: Any = sys.modules.get("torch.distributed._composable.replicate")  # not imported for this question
    if composable is None or not isinstance(module, composable.DDP):
        return None
    found = getattr(composable.replicate.state(module), "_ddp", None)
    return found if isinstance(found, DistributedDataParallel) else None
