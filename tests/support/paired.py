"""Attention with a dense mask, with a bias and with dropout: problems with fp64 results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor.model import AttentionSpec, Band, Bias, Dense, Dropout, Keys, Mask, Operand, Site
from dash_inductor.operators import attention as ops

from .attention import Attention
from .calls import BSHD
from .dropout import kept_pairs


@dataclass(frozen=True)
class PairedAttention:
    """q, k, v, do: [batch, heads, length, dim] with BSHD strides; the others are operands of a call, or None.

    dense: bool, bias: floats, both of size [batch, q heads, q_len, kv_len] or 1; keys: bool [batch, kv_len];
    seed: int64 [1], of dropout with probability `drops`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    band: Band
    scale: float
    dense: Tensor | None = None
    bias: Tensor | None = None
    keys: Tensor | None = None
    seed: Tensor | None = None
    drops: float = 0.0

    @staticmethod
    def random(
        q_len: int, kv_len: int, band: Band, *, dense: str = "none", bias: str = "none", keys: bool = False,
        dim: int = 24, group: int = 1, batch: int = 2, dtype: torch.dtype = torch.float32, scale: float = 0.3,
        drops: float = 0.0, device: str = "cpu", value_dim: int | None = None,
    ) -> PairedAttention:  # fmt: skip
        """dense, bias: "none", or the dimensions that matter, some of "bhqk" (or "1" for none of them).

        bias: also what it is, behind a colon: "random", "infinite" (minus infinity here and there, and for all keys of
        some rows) or "lowest" (the lowest number of its type in the same places).
        """
        kv_heads = 1 if group > 1 else 2
        p = Attention.random(
            q_len, kv_len, dim, band, batch=batch, kv_heads=kv_heads, group=group, dtype=dtype, device="cpu",
            value_dim=value_dim,
        )  # fmt: skip
        g = torch.Generator().manual_seed(1)

        def sized(dims: str) -> list[int]:
            sizes = zip("bhqk", (batch, kv_heads * group, q_len, kv_len), strict=True)
            return [size if name in dims else 1 for name, size in sizes]

        shown = added = valid = None
        if dense != "none":
            shown = torch.rand(sized(dense), generator=g) < 0.6
            if "k" in dense:
                shown[..., kv_len // 2] = False  # a key that no row sees
            if "q" in dense:
                shown[:, -1:, 1] = False  # rows that see no key
        dims, _, kind = bias.partition(":")
        if dims != "none":
            added = torch.randn(sized(dims), generator=g).to(dtype)
            if kind != "random":
                low = float("-inf") if kind == "infinite" else torch.finfo(dtype).min
                hidden = torch.rand(sized(dims), generator=g) < 0.4
                if "q" in dims:
                    hidden[:, :, 2] = True
                added.masked_fill_(hidden, low)
        if keys:
            valid = torch.rand(batch, kv_len, generator=g) < 0.8
        seed = torch.tensor([0x0123456789ABCDEF]) if drops else None
        tensors = (p.q, p.k, p.v, p.do, shown, added, valid, seed)
        q, k, v, do, shown, added, valid, seed = (None if t is None else t.to(device) for t in tensors)
        assert q is not None and k is not None and v is not None and do is not None  # noqa: PT018
        return PairedAttention(q, k, v, do, band, scale, shown, added, valid, seed, drops)

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    @property
    def plane(self) -> tuple[int, int, int, int]:
        batch, heads, q_len, _ = self.q.shape
        return batch, heads, q_len, self.k.shape[2]

    def keep(self) -> Tensor:
        """Whether queries see keys by the mask: booleans [batch, q heads, q_len, kv_len]."""
        keep = Attention(self.q, self.k, self.v, self.do, self.band, self.scale).keep().expand(self.plane)
        if self.dense is not None:
            keep = keep & self.dense
        return keep if self.keys is None else keep & self.keys[:, None, None]

    def exact(self) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """(out, gradients of q, k, v and the bias if there is one, which rows see a key), the first two in fp64.

        Rows that see no key, by the mask or for a bias of minus infinity, give zeros.
        """
        leaves = [t.double().requires_grad_() for t in (self.q, self.k, self.v)]
        q, k, v = leaves[0], *(t.repeat_interleave(self.group, 1) for t in leaves[1:])
        s = (q @ k.mT) * self.scale
        if self.bias is not None:
            leaves.append(self.bias.double().requires_grad_())
            s = s + leaves[3]
        keep = self.keep()
        sees = (keep & (s != float("-inf"))).any(3)
        s = torch.where(sees[..., None], s.masked_fill(~keep, float("-inf")), 0.0)
        p = torch.where(sees[..., None], s.softmax(3), 0.0)
        if self.seed is not None:
            dropout = Dropout(self.drops, Operand(0))
            p = p * kept_pairs(dropout, self.seed, *self.plane) * dropout.rescale
        out = p @ v
        return out.detach(), torch.autograd.grad(out, leaves, self.do.double()), sees

    def looked_at(self) -> tuple[Tensor, Tensor]:
        """Whether the mask shows rows a key, [batch, q heads, q_len], and keys to a row, [batch, kv heads, kv_len]."""
        keep = self.keep()
        return keep.any(3), keep.any(2).unflatten(1, (-1, self.group)).any(2)

    def surrounded(self, fill: float) -> PairedAttention:
        """The same problem cut out of larger tensors of `fill`, with `fill` in rows and keys that see nothing."""
        rows, keys = self.looked_at()

        def cut(tensor: Tensor, looked_at: Tensor) -> Tensor:
            b, h, length, dim = tensor.shape
            around = tensor.new_full((b, length + 16, h + 1, dim + 8), fill)
            inside = around[:, 8 : 8 + length, :h, :dim].transpose(1, 2)
            inside.copy_(torch.where(looked_at[..., None], tensor, fill))
            return inside

        return replace(self, q=cut(self.q, rows), do=cut(self.do, rows), k=cut(self.k, keys), v=cut(self.v, keys))

    def spec(self, results: int, *, gradient: bool = False) -> AttentionSpec:
        """The call of an operator with so many results, all with BSHD strides."""
        keys = None if self.keys is None else Keys(Operand(0))
        dense = None if self.dense is None else Dense(Operand(int(keys is not None)))
        place = int(keys is not None) + int(dense is not None)
        bias = None if self.bias is None else Bias(Operand(place), gradient, tuple(self.summed) if gradient else ())
        seed = Operand(place + int(bias is not None))
        dropout = None if self.seed is None else Dropout(self.drops, seed)
        return AttentionSpec(Mask(self.band, keys, None, dense), self.scale, (BSHD,) * results, bias, dropout)

    @property
    def extras(self) -> list[Tensor]:
        """The tensors that `call` names."""
        return [t for t in (self.keys, self.dense, self.bias, self.seed) if t is not None]

    def site(self, device: Any = "cuda") -> Site:
        (batch, heads, q_len, dim), (_, kv_heads, kv_len, _) = self.q.shape, self.k.shape
        dtype: Any = str(self.q.dtype).removeprefix("torch.")
        return Site(device, dtype, batch, heads, kv_heads, q_len, kv_len, dim, self.v.shape[3], self.spec(0))

    @property
    def summed(self) -> list[int]:
        """The dimensions of the bias over which the operator adds up its gradient."""
        return [] if self.bias is None else [d for d in (0, 1) if self.bias.shape[d] == 1]

    def reduced(self, gradient: Tensor) -> Tensor:
        """The operator's result for a bias's gradient, added up further to the size of the bias."""
        assert self.bias is not None
        dims = [d for d in range(4) if self.bias.shape[d] == 1 and gradient.shape[d] != 1]
        return gradient.double().sum(dims, keepdim=True) if dims else gradient.double()


def as_pytorch(p: PairedAttention) -> tuple[Tensor, ...]:
    """Output and gradients of PyTorch's math in the problem's dtype, with the pairs dropped that the problem drops."""
    leaves = [t.detach().clone().requires_grad_() for t in (p.q, p.k, p.v, *([] if p.bias is None else [p.bias]))]
    q, k, v = leaves[0], *(t.repeat_interleave(p.group, 1) for t in leaves[1:3])
    mask = torch.where(p.keep(), 0.0, float("-inf")).to(q.dtype)
    mask = mask if p.bias is None else mask + leaves[3]
    if p.seed is None:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=p.scale)
    else:
        dropout = Dropout(p.drops, Operand(0))
        kept = kept_pairs(dropout, p.seed, *p.plane) * dropout.rescale
        out = ((q @ k.mT * p.scale + mask).softmax(3) * kept.to(q.dtype)) @ v
    return out.detach(), *torch.autograd.grad(out, leaves, p.do)


def step(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, extras: list[Tensor], calls: tuple[str, str], plan: str
) -> tuple[Tensor, ...]:  # fmt: skip
    """out, dq, dk, dv and, if there is one, the gradient of the bias: to be compiled."""
    forward, backward = calls
    out, lse = ops.attention_forward(q, k, v, extras, forward, plan, "test")
    arguments = (do, q, k, v, out, lse, extras, backward, plan, "test")
    return (out, *ops.attention_backward(*arguments))
