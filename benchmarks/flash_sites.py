"""Calls of flash-attn's operators, compared with PyTorch's deterministic FlashAttention-2 and cuDNN.

The package need not be installed: stand-in operators with its names and arguments run PyTorch's FlashAttention-2.
"""

# No `from __future__ import annotations`: schemas are made of the annotations.
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .documents import packed
from .entry_steps import DEVICE, Step, made, measure, step
from .variants import DASH, DEFAULT, DETERMINISTIC

aten = torch.ops.aten


def _window(left: int, right: int) -> dict[str, int]:
    return {} if left < 0 and right < 0 else {"window_size_left": left, "window_size_right": right}


@torch.library.custom_op("benchmark_flash_attn::_flash_attn_forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, lse, state, _, _ = aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=softmax_scale,
        **_window(window_size_left, window_size_right),
    )  # fmt: skip
    return out, lse, q.new_empty(0), state.view(torch.int64).clone()


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    b, s, h, _ = q.shape
    lse, state = q.new_empty((b, h, s), dtype=torch.float32), q.new_empty(2, dtype=torch.int64)
    return torch.empty_like(q), lse, q.new_empty(0), state


@torch.library.custom_op("benchmark_flash_attn::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    raise NotImplementedError("it is there to be replaced")


@_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, *args: Any, **kw: Any) -> Tensor:
    return softmax_lse.new_empty(softmax_lse.shape)


class _Flash(torch.autograd.Function):
    """A stand-in for `FlashAttnFunc` of flash-attn."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: tuple[int, int]) -> Tensor:
        facts = 0.0, q.shape[-1] ** -0.5, causal, *window, 0.0, None
        out, lse, _, state = _forward(q, k, v, *facts, False)
        ctx.save_for_backward(q, k, v, out, lse, state)
        ctx.facts = facts
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, state = ctx.saved_tensors
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        _backward(dout, q, k, v, out, lse, *gradients, *ctx.facts, True, rng_state=state)
        return *gradients, None, None


def _package(causal: bool, window: tuple[int, int]) -> Callable[..., Tensor]:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Tensor = _Flash.apply(q, k, v, causal, window)
        return found

    return program


def _packed(starts: Tensor, longest: int, window: tuple[int, int]) -> Callable[..., Tensor]:
    """Returns a program of PyTorch's causal FlashAttention-2 on packed documents: [tokens, heads, head dim]."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Tensor = aten._flash_attention_forward(
            q, k, v, starts, starts, longest, longest, 0.0, True, False, scale=q.shape[-1] ** -0.5, **_window(*window)
        )[0]
        return found

    return program


def _flash_2(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: tuple[int, int]) -> Step:
    """Prepares PyTorch's FlashAttention-2: [batch, length, heads, head dim]."""
    q, k, v = (tensor.detach() for tensor in (q, k, v))
    sizes = q.shape[1], k.shape[1], 0.0, causal
    settings = {"scale": q.shape[-1] ** -0.5, **_window(*window)}

    def forward() -> Any:
        return aten._flash_attention_forward(q, k, v, None, None, *sizes, False, **settings)

    out, lse, seed, offset, _ = forward()
    grad = made(q.shape, seed=1)[0].detach()

    def backward() -> Any:
        return aten._flash_attention_backward(grad, q, k, v, out, lse, None, None, *sizes, seed, offset, **settings)

    return DETERMINISTIC.during(forward), DETERMINISTIC.during(backward)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Step:
    heads = [tensor.detach().transpose(1, 2) for tensor in (q, k, v)]
    scale, s = q.shape[-1] ** -0.5, q.shape[1]

    def forward() -> Any:
        return aten._scaled_dot_product_cudnn_attention(*heads, None, True, 0.0, causal, False, scale=scale)

    out, lse, _, _, _, _, seed, offset, _ = forward()
    grad = made(q.shape, seed=1)[0].detach().transpose(1, 2)

    def backward() -> Any:
        found = aten._scaled_dot_product_cudnn_attention_backward(
            grad, *heads, out, lse, seed, offset, None, None, None, s, s, 0.0, causal, scale=scale
        )
        return tuple(gradient.transpose(1, 2) for gradient in found)

    return DEFAULT.during(forward), DEFAULT.during(backward)


DENSE = (
    ("causal", True, (-1, -1), 4096),
    ("full", False, (-1, -1), 4096),
    ("window 1024", True, (1023, 0), 16384),
)
DOCUMENTS = (("documents", (-1, -1)), ("documents, window 1024", (1023, 0)))


def flash(tokens: int = 16384, width: int = 2048, count: int = 8) -> list[dict[str, Any]]:
    """Measures dense calls, with and without a window, and packed documents."""
    rows = []
    for dim in (128, 64):
        heads = width // dim
        for name, causal, window, length in DENSE:
            length = min(length, tokens)
            leaves = made(*[(tokens // length, length, heads, dim)] * 3)
            steps = {
                "dash": lambda c=causal, w=window, t=leaves: step(DASH, _package(c, w), t),
                "FA2 det": lambda c=causal, w=window, t=leaves: _flash_2(*t, c, w),
            }
            if window == (-1, -1):
                steps["cuDNN nondet"] = lambda c=causal, t=leaves: _cudnn(*t, c)
            rows += measure(f"{name} d{dim} b{tokens // length}h{heads} s{length}", steps, repeats=10)
        ends = (0, *packed(count, tokens))
        starts = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        longest = max(b - a for a, b in itertools.pairwise(ends))
        leaves = made(*[(tokens, heads, dim)] * 3)
        for name, window in DOCUMENTS:
            program = _packed(starts, longest, window)
            steps = {
                "dash": lambda p=program, t=leaves: step(DASH, p, t),
                "FA2 det": lambda p=program, t=leaves: step(DETERMINISTIC, p, t, eager=True),
            }
            rows += measure(f"{name} {count} d{dim} h{heads} t{tokens}", steps, repeats=10)
    return rows
