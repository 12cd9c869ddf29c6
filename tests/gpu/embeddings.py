"""The gradient of an embedding, by autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gradient(indices: Tensor, weight: Tensor, padding: int | None, grad: Tensor) -> Tensor:
    leaf = weight.detach().requires_grad_()
    (found,) = torch.autograd.grad(F.embedding(indices, leaf, padding_idx=padding), leaf, grad)
    return found
