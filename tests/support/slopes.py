"""ALiBi slopes as flash-attn defines them, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dash_inductor.model import Band


def bias_of(slopes: Tensor, q_len: int, kv_len: int) -> Tensor:
    """What slopes [heads] or [batch, heads] add to scores, [batch or 1, heads, q_len, kv_len]."""
    last = torch.arange(q_len, device=slopes.device)[:, None] + kv_len - q_len
    distance = (last - torch.arange(kv_len, device=slopes.device)).abs()
    return -slopes.reshape(-1, slopes.shape[-1], 1, 1) * distance


def exact(
    tensors: Sequence[Tensor], slopes: Tensor, band: Band, scale: float, softcap: float | None = None
) -> list[Tensor]:
    """Output and gradients of query, key and value in fp64; rows that see no key give zeros.

    Args:
        tensors: query and gradient of the output, [batch, q heads, q_len, dim], key and value between them.
    """
    q, k, v, do = (t.detach().double() for t in tensors)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    q_len, kv_len, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    s = q @ k.repeat_interleave(group, 1).mT * scale
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    band = band.resolve(q_len, kv_len)
    distance = torch.arange(q_len, device=q.device)[:, None] - torch.arange(kv_len, device=q.device)
    shown = torch.ones_like(distance, dtype=torch.bool)
    shown = shown if band.lo is None else shown & (distance >= band.lo)
    shown = shown if band.hi is None else shown & (distance <= band.hi)
    sees = shown.any(1, keepdim=True)
    s = s + bias_of(slopes.double(), q_len, kv_len)
    p = torch.where(shown | ~sees, s, float("-inf")).softmax(-1)
    out = torch.where(sees, p, 0.0) @ v.repeat_interleave(group, 1)
    return [out.detach(), *torch.autograd.grad(out, leaves, do)]
