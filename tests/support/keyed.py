"""Attention with a vector of valid keys and with segments: problems with fp64 results, and calls of the operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dash_inductor.model import AttentionSpec, Band, Keys, Mask, Operand, Plan, Segments, Site
from dash_inductor.operators import attention as ops

from .attention import Attention as Dense
from .attention import Gradients
from .calls import BSHD


@dataclass(frozen=True)
class KeyedAttention:
    """q, k, v, do: [batch, heads, length, dim] with BSHD strides; keys: bool [batch, kv_len] or None.

    segments: ids of queries and of keys, [batch, q_len] and [batch, kv_len], which may be one tensor; or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    keys: Tensor | None
    mask: Band
    scale: float
    segments: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def random(
        q_len: int, kv_len: int, mask: Band, *, dims: tuple[int, int] = (24, 24), batch: int = 2, kv_heads: int = 2,
        group: int = 1, dtype: torch.dtype = torch.float32, scale: float = 0.3, valid: str = "all", seed: int = 0,
        device: str = "cpu", documents: str = "none",
    ) -> KeyedAttention:  # fmt: skip
        """dims: of q and k, of v.

        valid: "all" (no vector), "ones", "holes", "padded" (right), "left" or "nobody" (in one batch element).
        documents: "none" (no segments), or as `segment_ids` has it.
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
        ids = None if documents == "none" else segment_ids(documents, batch, q_len, kv_len, seed=seed, device=device)
        return KeyedAttention(p.q, p.k, p.v, p.do, None if keys is None else keys.to(device), mask, scale, ids)

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    def keep(self) -> Tensor:
        """Whether queries see keys: booleans [batch, q_len, kv_len]."""
        keep = Dense(self.q, self.k, self.v, self.do, self.mask, self.scale).keep().expand(len(self.q), -1, -1)
        if self.segments is not None:
            keep = keep & (self.segments[0][:, :, None] == self.segments[1][:, None])
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
        spec = self.spec(0)
        return Site("cuda", dtype, batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim, spec)

    def spec(self, results: int) -> AttentionSpec:
        """The call of an operator with so many results, all with BSHD strides."""
        segments = None
        if self.segments is not None:
            segments = Segments(Operand(0), Operand(0 if self.segments[0] is self.segments[1] else 1))
        keys = None if self.keys is None else Keys(Operand(0 if segments is None else segments.kv.index + 1))
        return AttentionSpec(Mask(self.mask, keys, segments), self.scale, (BSHD,) * results)

    @property
    def extras(self) -> list[Tensor]:
        """The tensors that the mask of `call` names."""
        ids = [] if self.segments is None else list(self.segments)
        if len(ids) == 2 and ids[0] is ids[1]:
            ids.pop()
        return ids if self.keys is None else [*ids, self.keys]

    def for_elements(self, function: Callable[[Tensor], Tensor]) -> KeyedAttention:
        """The same problem with every tensor of the batch, all of which begin with the batch elements, replaced."""
        keys = None if self.keys is None else function(self.keys)
        segments = self.segments
        if segments is not None:
            q_ids = function(segments[0])
            segments = q_ids, q_ids if segments[1] is segments[0] else function(segments[1])
        q, k, v, do = map(function, (self.q, self.k, self.v, self.do))
        return replace(self, q=q, k=k, v=v, do=do, keys=keys, segments=segments)


def segment_ids(
    kind: str, batch: int, q_len: int, kv_len: int, *, seed: int = 0, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Ids of queries and of keys; where both are as long and made in one way, they are one tensor.

    kind: "sorted" (documents one after the other), "repeated" (ids that differ in their upper half alone, in any order
    and several times), "single" (documents of one token), "apart" (some queries and keys have no partner with their
    id, in one batch element none has) or "same" (one document).  Types and strides differ from kind to kind.
    """
    g = torch.Generator().manual_seed(seed)
    length = max(q_len, kv_len)
    begins = torch.rand(length, batch, generator=g) < 0.15
    low, other_low = (torch.randint(0, 4, (batch, n), generator=g) for n in (q_len, kv_len))
    element = torch.arange(batch)[:, None]
    ids = {
        "sorted": (begins.cumsum(0, dtype=torch.int32) - 2**31).t(),
        "repeated": torch.randint(-2, 2, (batch, length), generator=g) * 2**33,
        "single": torch.arange(length).expand(batch, -1),
        "apart": low,
        "same": torch.full((batch, length), -1, dtype=torch.int32),
    }[kind].to(device)
    if kind == "apart":
        return ids, (other_low + torch.where(element == 0, 10, 2)).to(torch.int32).to(device)
    return (ids, ids) if q_len == kv_len else (ids[:, :q_len], ids[:, :kv_len])


def attend(
    q: Tensor, k: Tensor, v: Tensor, extras: list[Tensor], spec: str, plan: Plan
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, log-sum-exp): to be compiled."""
    result: tuple[Tensor, Tensor] = ops.attention_forward(q, k, v, extras, spec, str(plan), "test")
    return result


def gradients(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, extras: list[Tensor], spec: str, plan: Plan
) -> Gradients:
    """(dq, dk, dv): to be compiled."""
    result: Gradients = ops.attention_backward(do, q, k, v, out, lse, extras, spec, str(plan), "test")
    return result
