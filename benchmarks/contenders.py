"""A user's choices for an attention backward: each a function from a shape and tensors to a call without arguments.

A contender that does not run a shape raises `NotRun` with the reason, or whatever PyTorch raises.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor.operators import attention as ops
from dash_inductor.planning import plan as make_plan

from . import library
from .common import NotRun
from .shapes import CAUSAL, FULL, Shape

aten = torch.ops.aten
Backward = Callable[[], Any]
Tensors = tuple[Tensor, ...]
BSHD = (0, 2, 1, 3)
LIBRARIES = FA3, DASH_FORK = "DASH_BENCHMARK_FA3", "DASH_BENCHMARK_DASH_FORK"
"""Environment variables that name shared libraries: FlashAttention-3, and the fork of it by the authors of DASH."""


def _window(shape: Shape) -> dict[str, int | None]:
    """Returns the window arguments for FlashAttention-2; with equal lengths the mask's anchor does not matter."""
    if shape.mask.hi is None:
        return {}
    return {"window_size_left": shape.mask.hi, "window_size_right": -(shape.mask.lo or 0)}


def forward(shape: Shape, tensors: Tensors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (out, natural log-sum-exp, seed, offset) of FlashAttention-2, with v padded to the head dim of q."""
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


def in_library(shape: Shape, tensors: Tensors, *, variable: str, deterministic: bool) -> Backward:
    """A backward of the shared library that an environment variable names; out and log-sum-exp by FlashAttention-2."""
    named = library.named(variable)
    out, lse, _, _ = forward(shape, tensors)
    return named.backward(shape, tensors, out, lse, deterministic=deterministic)


def flash4_forward(shape: Shape, *, deterministic: bool = False) -> Callable[..., tuple[Tensor, Tensor]]:
    """Prepares FlashAttention-4: a function of q, k and v to (out [batch, length, heads, value dim], log-sum-exp)."""
    try:
        from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found, unused-ignore]  # optional
    except ImportError as error:
        raise NotRun(f"FlashAttention-4 (the package flash-attn-4) is not there: {error}") from error
    window = (None, None) if shape.mask.hi is None else (shape.mask.hi, -(shape.mask.lo or 0))

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = flash_attn_func(
            *(t.transpose(1, 2) for t in (q, k, v)), softmax_scale=shape.scale, causal=shape.mask == CAUSAL,
            window_size=window, deterministic=deterministic, return_lse=True,
        )  # fmt: skip
        return out, lse

    return run


def flash4(shape: Shape, tensors: Tensors, *, deterministic: bool) -> Backward:
    """Prepares FlashAttention-4's backward, which runs through autograd."""
    leaves = [t.detach().requires_grad_() for t in tensors[:3]]
    out, _ = flash4_forward(shape, deterministic=deterministic)(*leaves)
    return lambda: torch.autograd.grad(out, leaves, tensors[3].transpose(1, 2), retain_graph=True)


def dash(shape: Shape, tensors: Tensors) -> Backward:
    """Prepares the compiled operator with the planner's plan; the forward is not timed."""
    plan, spec = str(make_plan(shape.site(), arch())), str(replace(shape.spec, orders=(BSHD,) * 3))
    q, k, v, do = tensors
    if shape.softcap is None:
        out, lse, _, _ = forward(shape, tensors)
    else:
        out, lse = _own_forward(shape, tensors, plan)

    def backward(*args: Tensor) -> Any:
        return ops.attention_backward(*args, [], spec, plan, "benchmark")

    compiled = torch.compile(backward, dynamic=False)
    return lambda: compiled(do, q, k, v, out, lse)


def _own_forward(shape: Shape, tensors: Tensors, plan: str) -> tuple[Tensor, Tensor]:
    """Returns (out, natural log-sum-exp) of the plan's own forward, for softcaps, which other contenders lack."""
    spec = str(replace(shape.spec, orders=(BSHD,)))

    def run(*args: Tensor) -> Any:
        return ops.attention_forward(*args, [], spec, plan, "benchmark")

    out, lse = torch.compile(run, dynamic=False)(*tensors[:3])
    return out, lse


def bounded(shape: Shape, tensors: Tensors, *, softcap: float) -> Backward:
    """Prepares `dash` with a softcap, which no other contender has: it shows the cost of the softcap."""
    return dash(replace(shape, softcap=softcap), tensors)


def arch() -> str:
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


CONTENDERS: dict[str, Callable[[Shape, Tensors], Backward]] = {
    "FA2 det": flash,
    "cuDNN nondet": cudnn,
    "flex": flex,
    "FA3 nondet": partial(in_library, variable=FA3, deterministic=False),
    "FA3 det": partial(in_library, variable=FA3, deterministic=True),
    "DASH fork det": partial(in_library, variable=DASH_FORK, deterministic=True),
    "FA4 nondet": partial(flash4, deterministic=False),
    "FA4 det": partial(flash4, deterministic=True),
    "dash": dash,
}
BOUNDED = "dash bounded"
"""The name of `bounded` among contenders, in runs that ask for it."""
UNDER_ALGORITHMS = ("FA2 det", "dash", BOUNDED)
"""The contenders that run under PyTorch's deterministic algorithms."""
DETERMINISTIC = (*UNDER_ALGORITHMS, "FA3 det", "DASH fork det", "FA4 det")
"""The contenders that promise the same bits."""


def versions() -> dict[str, str]:
    """Returns the versions of installed contenders that are neither part of PyTorch nor of this project."""
    found = {}
    for variable in LIBRARIES:
        with suppress(NotRun):
            found[variable] = library.named(variable).version
    with suppress(PackageNotFoundError):
        found["flash-attn-4"] = version("flash-attn-4")
    return found
