"""The pairs that dropout drops, and attention with dropout in double precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dash_inductor.kernels.reference.dropout import kept
from dash_inductor.model import Dropout


def kept_pairs(dropout: Dropout, seed: Tensor, batch: int, heads: int, q_len: int, kv_len: int) -> Tensor:
    """Whether the probabilities of a call are kept: booleans [batch, heads, q_len, kv_len]."""
    rows, keys = (torch.arange(length, device=seed.device) for length in (q_len, kv_len))
    planes = [[kept(dropout, seed, b, head, rows, keys) for head in range(heads)] for b in range(batch)]
    return torch.stack([torch.stack(of_element) for of_element in planes])


def dense(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, kept: Tensor, dropout: Dropout, scale: float
) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp) of plain operations, differentiable; rows that see no key give zeros and -inf.

    Args:
        visible, kept: booleans that broadcast to [batch, heads, q_len, kv_len].
    """
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    s = ((q @ k.mT) * scale).masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(s, -1)
    p = torch.where(visible, torch.exp(s - torch.where(lse.isfinite(), lse, 0.0)[..., None]), 0.0)
    return (p * kept * dropout.rescale) @ v, lse


def exact(
    tensors: Sequence[Tensor], grad_out: Tensor, visible: Tensor, kept: Tensor, dropout: Dropout, scale: float
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """(out, log-sum-exp, gradients) of query, key and value in fp64, as `dense` has them."""
    q, k, v = leaves = [t.detach().double().requires_grad_() for t in tensors]
    out, lse = dense(q, k, v, visible, kept, dropout, scale)
    return out.detach(), lse.detach(), torch.autograd.grad(out, leaves, grad_out.double())
