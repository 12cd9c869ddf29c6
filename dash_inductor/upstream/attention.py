"""PyTorch's attention: the builtin function behind `scaled_dot_product_attention`, and the order of its kernels."""

from __future__ import annotations

import torch
from torch._C._nn import scaled_dot_product_attention

__all__ = ["priority_order", "scaled_dot_product_attention"]


def priority_order() -> list[int]:
    """Values of `torch.nn.attention.SDPBackend`, from the first that PyTorch tries to the last."""
    return torch._C._get_sdp_priority_order()
