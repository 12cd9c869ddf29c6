"""PyTorch's type promotion for elementwise operators."""

from __future__ import annotations

from typing import Any

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes


def elementwise_dtype(*operands: Any) -> torch.dtype:
    """The dtype to which PyTorch promotes these tensors and Python numbers in an elementwise operator."""
    found: torch.dtype = elementwise_dtypes(*operands, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)[1]
    return found
