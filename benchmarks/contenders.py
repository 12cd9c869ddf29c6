"""What a user can pick for an attention backward: each a function from a shape and tensors to a call without arguments.

A contender that does not run a shape raises `NotRun` with the reason, or whatever PyTorch raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor import ops
from dash_inductor.model import Call, Mask
from dash_inductor.planning import plan as make_plan

from .shapes import FULL, Shape

aten = torch.ops.aten
Backward = Callable[[], Any]
Tensors = tuple[Tensor, ...]
BSHD = (0, 2, 1, 3)


class NotRun(RuntimeError):
    """A contender has no way to run a shape."""


def _window(shape: Shape) -> dict[str, int | None]:
    """The mask for FlashAttention-2; with equal lengths both corners it could be anchored at agree."""
    if shape.mask.hi is None:
        return {}
    return {"window_size_left": shape.mask.hi, "window_size_right": -(shape.mask.lo or 0)}


def forward(shape: Shape, tensors: Tensors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, natural log-sum-exp, seed, offset) by FlashAttention-2, v padded to the head dim of q."""
    q, k, v, _ = tensors
    v = F.pad(v, (0, shape.head_dim - shape.value_dim))
    s = shape.length
    out, lse, seed, offset, _ = aten._flash_attention_forward(
        *(t.transpose(1, 2) for t in (q, k, v)), None, None, s, s, 0.0, shape.mask.lo is not None, False,
        scale=shape.scale, **_window(shape),
    )  # fmt: skip
    return out.transpose(1, 2)[..., : shape.value_dim], lse, seed, offset


def flash(shape: Shape, tensors: Tensors) -> Backward:
    if shape.head_dim != shape.value_dim:
        raise NotRun("FlashAttention-2 wants one head dim")
    q, k, v, do = (t.transpose(1, 2) for t in tensors)
    out, lse, seed, offset = forward(shape, tensors)
    s, causal = shape.length, shape.mask.lo is not None
    return lambda: tuple(
        g.transpose(1, 2)
        for g in aten._flash_attention_backward(
            do, q, k, v, out.transpose(1, 2), lse, None, None, s, s, 0.0, causal, seed, offset, scale=shape.scale,
            **_window(shape),
        )
    )  # fmt: skip


def cudnn(shape: Shape, tensors: Tensors) -> Backward:
    if shape.mask.hi is not None:
        raise NotRun("PyTorch gives cuDNN no windows")
    q, k, v, do = tensors
    causal, s = shape.mask.lo is not None, shape.length
    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=shape.scale
    )
    return lambda: aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, out, lse, seed, offset, None, None, None, s, s, 0.0, causal, scale=shape.scale
    )


def flex(shape: Shape, tensors: Tensors) -> Backward:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    lo, hi, s = shape.mask.lo, shape.mask.hi, shape.length

    def keep(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = i >= j + lo  # type: ignore[operator]  # every mask here but the full one has lo
        return seen if hi is None else seen & (i - j <= hi)

    mask = None if shape.mask == FULL else create_block_mask(keep, None, None, s, s, device="cuda")
    leaves = [t.detach().requires_grad_() for t in tensors[:3]]
    run = torch.compile(flex_attention, dynamic=False)
    out = run(*leaves, block_mask=mask, scale=shape.scale, enable_gqa=shape.q_heads != shape.kv_heads)
    return lambda: torch.autograd.grad(out, leaves, tensors[3], retain_graph=True)


def dash(shape: Shape, tensors: Tensors) -> Backward:
    """The compiled op with the planner's plan; forward excluded."""
    plan, call = str(make_plan(shape.site(), arch())), str(Call(Mask(shape.mask), shape.scale, (BSHD,) * 3))
    q, k, v, do = tensors
    out, lse, _, _ = forward(shape, tensors)

    def backward(*args: Tensor) -> Any:
        return ops.attention_backward(*args, [], call, plan, "benchmark")

    compiled = torch.compile(backward, dynamic=False)
    return lambda: compiled(do, q, k, v, out, lse)


def arch() -> str:
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


CONTENDERS: dict[str, Callable[[Shape, Tensors], Backward]] = {
    "FA2 det": flash,
    "cuDNN nondet": cudnn,
    "flex": flex,
    "dash": dash,
}
DETERMINISTIC = ("FA2 det", "dash")
"""Those that run under deterministic algorithms."""
