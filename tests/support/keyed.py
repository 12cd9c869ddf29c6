"""Attention with a vector of valid keys: problems with fp64 results, and calls of the operators."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dash_inductor import ops
from dash_inductor.model import Band, Call, Keys, Mask, Operand, Plan, Site

from .attention import Attention as Dense
from .attention import Gradients
from .calls import BSHD


@dataclass(frozen=True)
class KeyedAttention:
    """q, k, v, do: [batch, heads, length, dim] with BSHD strides; keys: bool [batch, kv_len] or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    keys: Tensor | None
    mask: Band
    scale: float

    @staticmethod
    def random(
        q_len: int, kv_len: int, mask: Band, *, dims: tuple[int, int] = (24, 24), batch: int = 2, kv_heads: int = 2,
        group: int = 1, dtype: torch.dtype = torch.float32, scale: float = 0.3, valid: str = "all", seed: int = 0,
        device: str = "cpu",
    ) -> KeyedAttention:  # fmt: skip
        """dims: of q and k, of v.

        valid: "all" (no vector), "ones", "holes", "padded" (right), "left" or "nobody" (in one batch element).
        """
        p = Dense.random(
            q_len, kv_len, dims[0], mask, batch=batch, kv_heads=kv_heads, group=group, dtype=dtype, device=device,
            value_dim=dims[1], seed=seed,
        )  # fmt: skip
        g = torch.Generator().manual_seed(seed)
        place, length = torch.arange(kv_len), torch.randint(1, kv_len + 1, (batch, 1), generator=g)
        keys = {
            "all": None,
            "ones": torch.ones(batch, kv_len, dtype=torch.bool),
            "holes": torch.rand(batch, kv_len, generator=g) < 0.6,
            "padded": place < length,
            "left": place >= length,
            "nobody": (place < kv_len - 1) & (torch.arange(batch) > 0)[:, None],
        }[valid]
        return KeyedAttention(p.q, p.k, p.v, p.do, None if keys is None else keys.to(device), mask, scale)

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    def keep(self) -> Tensor:
        """Who sees whom: booleans [batch, q_len, kv_len]."""
        keep = Dense(self.q, self.k, self.v, self.do, self.mask, self.scale).keep().expand(len(self.q), -1, -1)
        return keep if self.keys is None else keep & (self.keys != 0)[:, None]

    def exact(self) -> tuple[Tensor, Tensor, Gradients]:
        """(out, log-sum-exp, gradients) in fp64, by autograd; rows that see no key give zeros and -inf."""
        leaves = [t.double().requires_grad_() for t in (self.q, self.k, self.v)]
        q, k, v = leaves[0], *(t.repeat_interleave(self.group, 1) for t in leaves[1:])
        keep = self.keep()[:, None]
        s = ((q @ k.mT) * self.scale).masked_fill(~keep, float("-inf"))
        lse = torch.logsumexp(s, -1)
        p = torch.where(keep, torch.exp(s - torch.where(lse.isfinite(), lse, 0.0)[..., None]), 0.0)
        out = p @ v
        return out.detach(), lse.detach(), torch.autograd.grad(out, leaves, self.do.double())

    def surrounded(self, fill: float) -> KeyedAttention:
        """The same problem cut out of larger tensors of `fill`, with `fill` in rows and keys that see nothing."""
        keep = self.keep()

        def cut(tensor: Tensor, looked_at: Tensor) -> Tensor:
            b, h, length, dim = tensor.shape
            around = tensor.new_full((b, length + 16, h + 1, dim + 8), fill)
            inside = around[:, 8 : 8 + length, :h, :dim].transpose(1, 2)
            inside.copy_(torch.where(looked_at[:, None, :, None], tensor, fill))
            return inside

        rows, keys = keep.any(2), keep.any(1)
        q, do, k, v = cut(self.q, rows), cut(self.do, rows), cut(self.k, keys), cut(self.v, keys)
        return replace(self, q=q, k=k, v=v, do=do)

    def site(self) -> Site:
        """The facts of a site on CUDA."""
        (batch, q_heads, q_len, head_dim), (_, kv_heads, kv_len, value_dim) = self.q.shape, self.v.shape
        dtype: Any = str(self.q.dtype).removeprefix("torch.")
        call = self.call(0)
        return Site("cuda", dtype, batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim, call)

    def call(self, results: int) -> Call:
        """The call of an operator with so many results, all with BSHD strides."""
        return Call(mask_of(self.mask, self.keys), self.scale, (BSHD,) * results)


def mask_of(band: Band, keys: Tensor | None) -> Mask:
    """The band, and the vector of valid keys if there is one."""
    return Mask(band, None if keys is None else Keys(Operand(0)))


def extras_of(keys: Tensor | None) -> list[Tensor]:
    """The tensors that `mask_of` names."""
    return [] if keys is None else [keys]


def attend(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, mask: Band, scale: float, plan: Plan
) -> tuple[Tensor, Tensor]:
    """(out with BSHD strides, log-sum-exp): to be compiled."""
    call = str(Call(mask_of(mask, keys), scale, (BSHD,)))
    result: tuple[Tensor, Tensor] = ops.attention_forward(q, k, v, extras_of(keys), call, str(plan), "test")
    return result


def gradients(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, keys: Tensor | None, mask: Band,
    scale: float, plan: Plan,
) -> Gradients:  # fmt: skip
    """(dq, dk, dv) with BSHD strides: to be compiled."""
    call = str(Call(mask_of(mask, keys), scale, (BSHD,) * 3))
    result: Gradients = ops.attention_backward(do, q, k, v, out, lse, extras_of(keys), call, str(plan), "test")
    return result
