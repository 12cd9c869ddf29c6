"""Attention problems with fp64 gradients, and dash gradients through `torch.compile`, for tests of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dash_inductor import lowering
from dash_inductor.kernels.reference.backward import visible
from dash_inductor.model import Band, Plan, Site
from dash_inductor.operators import attention as ops
from dash_inductor.planning import plan

from .calls import backward_spec, spec_of

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Attention:
    """Random inputs [batch, heads, length, head dim] with BSHD strides, as models have them."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    mask: Band
    scale: float

    @staticmethod
    def random(
        q_len: int, kv_len: int, head_dim: int, mask: Band, *, batch: int = 2, kv_heads: int = 2, group: int = 1,
        dtype: torch.dtype = torch.bfloat16, device: str = "cuda", seed: int = 0, value_dim: int | None = None,
    ) -> Attention:  # fmt: skip
        """`value_dim` is the head dim of v, where it is not `head_dim`."""
        g = torch.Generator(device=device).manual_seed(seed)

        def tensor(length: int, heads: int, dim: int) -> Tensor:
            return torch.randn(batch, length, heads, dim, device=device, generator=g).to(dtype).transpose(1, 2)

        q_heads, value_dim = kv_heads * group, head_dim if value_dim is None else value_dim
        q, k = tensor(q_len, q_heads, head_dim), tensor(kv_len, kv_heads, head_dim)
        v, do = tensor(kv_len, kv_heads, value_dim), tensor(q_len, q_heads, value_dim)
        return Attention(q, k, v, do, mask, head_dim**-0.5)

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    def keep(self) -> Tensor:
        """The mask as booleans [q_len, kv_len]."""
        q_len, kv_len, device = self.q.shape[2], self.k.shape[2], self.q.device
        band = self.mask.resolve(q_len, kv_len)
        return visible(band, torch.arange(q_len, device=device), torch.arange(kv_len, device=device))

    def exact(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Gradients]:
        """(out, log-sum-exp, gradients) by autograd in `dtype`; rows that see no key give zeros."""
        leaves = [t.to(dtype).requires_grad_() for t in (self.q, self.k, self.v)]
        q, k, v = leaves[0], *(t.repeat_interleave(self.group, 1) for t in leaves[1:])
        keep = self.keep()
        s = ((q @ k.mT) * self.scale).masked_fill(~keep, float("-inf"))
        lse = torch.logsumexp(s, -1)
        p = torch.where(keep, torch.exp(s - torch.where(lse.isfinite(), lse, 0.0)[..., None]), 0.0)
        out = p @ v
        return out.detach(), lse.detach(), torch.autograd.grad(out, leaves, self.do.to(dtype))

    def site(self) -> Site:
        cuda = self.q.device.type == "cuda"
        (batch, q_heads, q_len, head_dim), (_, kv_heads, kv_len, value_dim) = self.q.shape, self.v.shape
        dtype: Any = str(self.q.dtype).removeprefix("torch.")
        return Site(
            "cuda" if cuda else "cpu", dtype, batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim,
            spec_of(self.mask, self.scale),
        )  # fmt: skip

    def plan(self, arch: str = "sm_90", schedule: str | None = None) -> Plan:
        return plan(self.site(), arch, schedule)

    def rounded_forward(self) -> tuple[Tensor, Tensor]:
        """out in the inputs' dtype and fp32 log-sum-exp, from the exact forward."""
        out, lse, _ = self.exact()
        return out.to(self.q.dtype).detach(), lse.float().detach()


def compiled_backward(mask: Band, scale: float, plan: Plan, *, dynamic: bool = False) -> Callable[..., Gradients]:
    """`attention_backward` through Inductor: (do, q, k, v, out, lse) -> (dq, dk, dv) with BSHD strides."""
    lowering.register()
    spec = str(backward_spec(mask, scale))

    def backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        gradients: Gradients = ops.attention_backward(do, q, k, v, out, lse, [], spec, str(plan), "test")
        return gradients

    compiled = torch.compile(backward, dynamic=False)
    if not dynamic:
        return compiled

    def with_dynamic_lengths(do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        for t in (do, q, k, v, out, lse):
            torch._dynamo.maybe_mark_dynamic(t, 2)
        return compiled(do, q, k, v, out, lse)

    return with_dynamic_lengths


def errors(gradients: Gradients, exact: Gradients) -> list[float]:
    """Largest absolute error of each gradient."""
    return [float((a.double() - b).abs().max()) for a, b in zip(gradients, exact, strict=True)]
