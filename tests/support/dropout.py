"""What dropout drops, and attention with that in double precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from dash_inductor.kernels.reference_dropout import kept
from torch import Tensor

from dash_inductor.model import Dropout


def kept_pairs(dropout: Dropout, seed: Tensor, batch: int, heads: int, q_len: int, kv_len: int) -> Tensor:
    """Which probabilities of a call are kept: booleans [batch, heads, q_len, kv_len]."""
    rows, keys = (torch.arange(length, device=seed.device) for length in (q_len, kv_len))
    planes = [[kept(dropout, seed, b, head, rows, keys) for head in range(heads)] for b in range(batch)]
    return torch.stack([torch.stack(of_element) for of_element in planes])


def exact(
    tensors: Sequence[Tensor], grad_out: Tensor, visible: Tensor, kept: Tensor, dropout: Dropout, scale: float
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """(out, log-sum-exp, gradients) of query, key and value in fp64; rows that see no key give zeros.

    visible, kept: booleans that broadcast to [batch, heads, q_len, kv_len].
    """
    leaves = [t.detach().double().requires_grad_() for t in tensors]
    group = leaves[0].shape[1] // leaves[1].shape[1]
    q, k, v = leaves[0], *(t.repeat_interleave(group, 1) for t in leaves[1:])
    s = ((q @ k.mT) * scale).masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(s, -1)
    p = torch.where(visible, torch.exp(s - torch.where(lse.isfinite(), lse, 0.0)[..., None]), 0.0)
    out = (p * kept * dropout.rescale) @ v
    return out.detach(), lse.detach(), torch.autograd.grad(out, leaves, grad_out.double())
