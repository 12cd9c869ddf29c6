"""Attention with a vector of valid keys: problems with fp64 results, and operators that Inductor lowers to kernels.

The operators of the package take no such vector; those of this module, `dash_test::forward` and `dash_test::backward`,
are lowered by the package's own functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dash_inductor.schedule import Band, Plan

from .attention import BSHD, Gradients, Problem


@dataclass(frozen=True)
class Attention:
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
    ) -> Attention:  # fmt: skip
        """dims: of q and k, of v.  valid: "all" (no vector), "holes", "padded" (right), "left" or "nobody" (in one)."""
        p = Problem.random(
            q_len, kv_len, dims[0], mask, batch=batch, kv_heads=kv_heads, group=group, dtype=dtype, device="cpu",
            value_dim=dims[1], seed=seed,
        )  # fmt: skip
        g = torch.Generator().manual_seed(seed)
        place, length = torch.arange(kv_len), torch.randint(1, kv_len + 1, (batch, 1), generator=g)
        keys = {
            "all": None,
            "holes": torch.rand(batch, kv_len, generator=g) < 0.6,
            "padded": place < length,
            "left": place >= length,
            "nobody": (place < kv_len - 1) & (torch.arange(batch) > 0)[:, None],
        }[valid]
        return Attention(p.q, p.k, p.v, p.do, keys, mask, scale)

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    def keep(self) -> Tensor:
        """Who sees whom: booleans [batch, q_len, kv_len]."""
        keep = Problem(self.q, self.k, self.v, self.do, self.mask, self.scale).keep().expand(len(self.q), -1, -1)
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

    def surrounded(self, fill: float) -> Attention:
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


_lib = torch.library.Library("dash_test", "DEF")
_lib.define(
    "forward(Tensor query, Tensor key, Tensor value, Tensor? keys, str mask, float scale, int[] out_order, str plan) "
    "-> (Tensor out, Tensor logsumexp)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_lib.define(
    "backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor? keys, "
    "str mask, float scale, int[] order, str plan) -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def _fake_forward(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor | None, mask: str, scale: float, order: list[int], plan: str
) -> tuple[Tensor, Tensor]:
    from dash_inductor import ops

    return ops._fake_forward(query, key, value, mask, scale, order, plan, "test")


def _fake_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, keys: Tensor | None,
    mask: str, scale: float, order: list[int], plan: str,
) -> Gradients:  # fmt: skip
    from dash_inductor import ops

    orders = order, order, order
    return ops._fake_backward(grad_out, query, key, value, out, logsumexp, mask, scale, *orders, plan, "test")


torch.library.register_fake("dash_test::forward", _fake_forward, lib=_lib)
torch.library.register_fake("dash_test::backward", _fake_backward, lib=_lib)


def register() -> None:
    """Make Inductor lower the two operators; imports Inductor."""
    from dash_inductor.lowering.backward import attention_backward
    from dash_inductor.lowering.forward import attention_forward
    from torch._inductor.lowering import register_lowering

    def forward(
        query: Any, key: Any, value: Any, keys: Any, mask: str, scale: float, order: Sequence[int], plan: str
    ) -> Any:
        return attention_forward(query, key, value, mask, scale, order, plan, "test", keys)

    def backward(
        grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, keys: Any, mask: str, scale: float,
        order: Sequence[int], plan: str,
    ) -> Any:  # fmt: skip
        tensors = grad_out, query, key, value, out, logsumexp
        return attention_backward(*tensors, mask, scale, order, order, order, plan, "test", keys)

    register_lowering(torch.ops.dash_test.forward.default, type_promotion_kind=None)(forward)
    register_lowering(torch.ops.dash_test.backward.default, type_promotion_kind=None)(backward)


def attend(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, mask: Band, scale: float, plan: Plan
) -> tuple[Tensor, Tensor]:
    """(out with BSHD strides, log-sum-exp): to be compiled."""
    result: tuple[Tensor, Tensor] = torch.ops.dash_test.forward(q, k, v, keys, str(mask), scale, BSHD, str(plan))
    return result


def gradients(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, keys: Tensor | None, mask: Band,
    scale: float, plan: Plan,
) -> Gradients:  # fmt: skip
    """(dq, dk, dv) with BSHD strides: to be compiled."""
    arguments = do, q, k, v, out, lse, keys, str(mask), scale, BSHD, str(plan)
    result: Gradients = torch.ops.dash_test.backward(*arguments)
    return result
