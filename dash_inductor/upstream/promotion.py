"""The rules by which operators convert their operands."""

from __future__ import annotations

from typing import Any

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes


def elementwise_dtype(*operands: Any) -> torch.dtype:
    """The type in which an elementwise operator of tensors and numbers has its result."""
    found: torch.dtype = elementwise_dtypes(*operands, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)[1]
    return found
