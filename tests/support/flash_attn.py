"""The operators of flash-attn 2 and 3, by exact math: their schemas and autograd functions, and no kernels.

The autograd functions are as in the packages: their backward calls an operator that writes dq, dk and dv in place, so
that joint graphs hold functionalized calls.  Tensors are [batch, length, heads, head dim], or [tokens, heads, head dim]
of documents.
"""

# No `from __future__ import annotations`: schemas are made of the annotations.
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .slopes import bias_of


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    dout: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Output and log-sum-exp [batch, heads, length], in the dtype of q; zeros and infinity where a query sees no key.

    With `dout`, its gradients dq, dk and dv: operators run below autograd, so they are written out.
    """
    (_, kv_len, kv_heads, _), group = k.shape, q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), *(t.transpose(1, 2).repeat_interleave(group, 1) for t in (k, v))
    scores = q @ k.mT * scale
    bounded = torch.tanh(scores / softcap) if softcap else torch.zeros_like(scores)
    if softcap:
        scores = softcap * bounded
    q_len = q.shape[2]
    if slopes is not None:
        scores = scores + bias_of(slopes.to(scores.dtype), q_len, kv_len)
    left, right = window if not causal else (window[0], 0)
    distance = torch.arange(q_len, device=q.device)[:, None] + kv_len - q_len - torch.arange(kv_len, device=q.device)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= distance < -right
    sees = ~hidden.all(1)
    scores = scores.masked_fill(hidden & sees[:, None], -math.inf)
    probabilities = torch.softmax(scores, -1) * sees[:, None]
    out = probabilities @ v
    if dout is None:
        return out.transpose(1, 2), torch.logsumexp(scores, -1).masked_fill(~sees, math.inf)
    do = dout.transpose(1, 2)
    ds = probabilities * (do @ v.mT - (do * out).sum(-1, keepdim=True)) * (1 - bounded**2) * scale
    dk, dv = (
        (pairs.mT @ rows).unflatten(1, (kv_heads, group)).sum(2) for pairs, rows in ((ds, q), (probabilities, do))
    )
    return tuple(gradient.transpose(1, 2) for gradient in (ds @ k, dk, dv))


def packed(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """The same of documents, each alone; the log-sum-exp is [heads, tokens]."""
    out, lse = [], []
    places = starts.tolist()
    for begin, end in itertools.pairwise(places):
        part = attention(*(t[None, begin:end] for t in (q, k, v)), *args)
        out.append(part[0][0])
        lse.append(part[1][0])
    rest = v[places[-1] :].repeat_interleave(q.shape[1] // v.shape[1], 1) + q[places[-1] :] * 0
    return torch.cat([*out, rest]), torch.cat([*lse, rest.new_zeros(q.shape[1], len(rest))], 1)


def _forward(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, *args: Any) -> tuple[Tensor, Tensor]:
    tensors = [t.double() for t in (q, k, v)]
    out, lse = attention(*tensors, *args) if starts is None else packed(*tensors, starts, *args)
    return out.to(q.dtype).contiguous(), lse.float().contiguous()


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    slopes: Tensor | None = None,
) -> tuple[Tensor, ...]:
    tensors, args = [t.double() for t in (q, k, v)], (scale, causal, window, softcap, slopes)
    if starts is None:
        return attention(*tensors, *args, dout.double())
    dq, dk, dv = (torch.zeros_like(t) for t in tensors)
    for begin, end in itertools.pairwise(starts.tolist()):
        q, k, v, do = (t[None, begin:end] for t in (*tensors, dout.double()))
        dq[begin:end], dk[begin:end], dv[begin:end] = (t[0] for t in attention(q, k, v, *args, do))
    return dq, dk, dv


def _write(into: tuple[Tensor | None, ...], gradients: tuple[Tensor, ...]) -> None:
    for tensor, gradient in zip(into, gradients, strict=True):
        assert tensor is not None
        tensor.copy_(gradient)


def _no_dropout(dropout_p: float) -> None:
    if dropout_p:
        raise NotImplementedError("dropout")


# ---- flash_attn 2 ----


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def _fa2_forward(
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
    _no_dropout(dropout_p)
    window = window_size_left, window_size_right
    out, lse = _forward(q, k, v, None, softmax_scale, causal, window, softcap, alibi_slopes)
    return out, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64, device=q.device)


@_fa2_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    b, s, h, _ = q.shape
    state = torch.empty(2, dtype=torch.int64, device=q.device)
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty((b, h, s), dtype=torch.float32), q.new_empty(0), state


@torch.library.custom_op("flash_attn::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
def _fa2_backward(
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
    _no_dropout(dropout_p)
    window = window_size_left, window_size_right
    _write((dq, dk, dv), _backward(dout, q, k, v, None, softmax_scale, causal, window, softcap, alibi_slopes))
    return softmax_lse.new_empty(softmax_lse.shape)


@_fa2_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, *args: Any, **kw: Any) -> Tensor:
    return softmax_lse.new_empty(softmax_lse.shape)


@torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=())
def _fa2_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _no_dropout(dropout_p)
    window = window_size_left, window_size_right
    out, lse = _forward(q, k, v, cu_seqlens_q, softmax_scale, causal, window, softcap, alibi_slopes)
    return out, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64, device=q.device)


@_fa2_varlen_forward.register_fake
def _(q: Tensor, *args: Any, **kw: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    t, h, _ = q.shape
    state = torch.empty(2, dtype=torch.int64, device=q.device)
    return torch.empty_like(q), q.new_empty((h, t), dtype=torch.float32), q.new_empty(0), state


@torch.library.custom_op("flash_attn::_flash_attn_varlen_backward", mutates_args=("dq", "dk", "dv"))
def _fa2_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    _no_dropout(dropout_p)
    window = window_size_left, window_size_right
    found = _backward(dout, q, k, v, cu_seqlens_q, softmax_scale, causal, window, softcap, alibi_slopes)
    _write((dq, dk, dv), found)
    return softmax_lse.new_empty(softmax_lse.shape)


@_fa2_varlen_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, *args: Any, **kw: Any) -> Tensor:
    return softmax_lse.new_empty(softmax_lse.shape)


class _FA2(torch.autograd.Function):
    """`FlashAttnFunc`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rest: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        dropout_p, causal, window, softcap, slopes = rest
        facts = dropout_p, q.shape[-1] ** -0.5, causal, *window, softcap, slopes
        out, lse, _, state = torch.ops.flash_attn._flash_attn_forward(q, k, v, *facts, False)
        ctx.save_for_backward(q, k, v, out, lse, state)
        ctx.facts = facts
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Any) -> tuple[Any, ...]:
        q, k, v, out, lse, state = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        torch.ops.flash_attn._flash_attn_backward(
            dout, q, k, v, out, lse, dq, dk, dv, *ctx.facts, True, rng_state=state
        )
        return dq, dk, dv, None


class _Packed(torch.autograd.Function):
    """`FlashAttnQKVPackedFunc` and, with a tensor of queries, `FlashAttnKVPackedFunc`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor | None, together: Tensor, causal: bool) -> Tensor:
        tensors = [*([] if q is None else [q]), *together.unbind(2)]
        facts = 0.0, tensors[0].shape[-1] ** -0.5, causal, -1, -1, 0.0, None
        out, lse, _, state = torch.ops.flash_attn._flash_attn_forward(*tensors, *facts, False)
        ctx.save_for_backward(*tensors, out, lse, state)
        ctx.facts, ctx.all, ctx.size = facts, q is None, together.shape
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, state = ctx.saved_tensors
        together = torch.empty(ctx.size, dtype=q.dtype, device=q.device)
        dq = None if ctx.all else torch.empty_like(q)
        parts = [*([] if dq is None else [dq]), *(together[:, :, i] for i in range(ctx.size[2]))]
        torch.ops.flash_attn._flash_attn_backward(dout, q, k, v, out, lse, *parts, *ctx.facts, True, rng_state=state)
        return dq, together, None


class _FA2Varlen(torch.autograd.Function):
    """`FlashAttnVarlenFunc`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, rest: tuple[Any, ...]) -> Any:
        longest, dropout_p, causal, window, softcap, slopes = rest
        facts = longest, longest, dropout_p, q.shape[-1] ** -0.5, causal, *window, softcap, slopes
        out, lse, _, state = torch.ops.flash_attn._flash_attn_varlen_forward(q, k, v, cu_q, cu_k, *facts)
        ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k, state)
        ctx.facts = facts
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Any) -> tuple[Any, ...]:
        q, k, v, out, lse, cu_q, cu_k, state = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        torch.ops.flash_attn._flash_attn_varlen_backward(
            dout, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, *ctx.facts, True, rng_state=state
        )
        return dq, dk, dv, None, None, None


Window = tuple[int, int]


def fa2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window: Window = (-1, -1),
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
) -> Any:
    """`flash_attn.flash_attn_func`."""
    out, lse = _FA2.apply(q, k, v, (dropout_p, causal, window, softcap, slopes))
    return (out, lse) if return_lse else out


def fa2_qkvpacked(qkv: Tensor, causal: bool = False) -> Tensor:
    """`flash_attn.flash_attn_qkvpacked_func`: [batch, length, 3, heads, head dim]."""
    found: Tensor = _Packed.apply(None, qkv, causal)
    return found


def fa2_kvpacked(q: Tensor, kv: Tensor, causal: bool = False) -> Tensor:
    """`flash_attn.flash_attn_kvpacked_func`: [batch, length, 2, kv heads, head dim]."""
    found: Tensor = _Packed.apply(q, kv, causal)
    return found


def fa2_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest: int,
    causal: bool = False,
    window: Window = (-1, -1),
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
) -> Any:
    """`flash_attn.flash_attn_varlen_func`: [tokens, heads, head dim]."""
    out, lse = _FA2Varlen.apply(q, k, v, cu_q, cu_k, (longest, dropout_p, causal, window, softcap, slopes))
    return (out, lse) if return_lse else out


# ---- flash_attn 3 ----


def fa3(namespace: str = "flash_attn_3") -> Callable[..., Any]:
    """`flash_attn_interface.flash_attn_func` of a namespace; with `cu` and `longest`, `flash_attn_varlen_func`."""

    @torch.library.custom_op(f"{namespace}::_flash_attn_forward", mutates_args=())
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_new: Tensor | None = None,
        v_new: Tensor | None = None,
        qv: Tensor | None = None,
        out_: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        cu_seqlens_k_new: Tensor | None = None,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        page_table: Tensor | None = None,
        kv_batch_idx: Tensor | None = None,
        leftpad_k: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        seqlens_rotary: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size_left: int = -1,
        window_size_right: int = -1,
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: Tensor | None = None,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        window = window_size_left, window_size_right
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        out, lse = _forward(q, k, v, cu_seqlens_q, scale, causal, window, softcap)
        return out, torch.where(lse == math.inf, -math.inf, lse), q.new_empty(0), q.new_empty(0)

    @forward.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kw: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        size = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
        return out, q.new_empty(size, dtype=torch.float32), q.new_empty(0), q.new_empty(0)

    @torch.library.custom_op(f"{namespace}::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
    def backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        sequed_q: Tensor | None = None,
        sequed_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        dq: Tensor | None = None,
        dk: Tensor | None = None,
        dv: Tensor | None = None,
        softmax_scale: float | None = None,
        is_causal: bool = False,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        deterministic: bool = False,
        sm_margin: int = 0,
    ) -> Tensor:
        window = window_size_left, window_size_right
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        _write((dq, dk, dv), _backward(dout, q, k, v, cu_seqlens_q, scale, is_causal, window, softcap))
        return softmax_lse.new_empty(softmax_lse.shape)

    @backward.register_fake
    def _(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, *a: Any, **k_: Any
    ) -> Tensor:
        return softmax_lse.new_empty(softmax_lse.shape)

    operators = getattr(torch.ops, namespace)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu: Tensor | None, cu_k: Tensor | None, rest: Any
        ) -> Any:
            longest, causal, window, softcap, options = rest
            facts = {"softmax_scale": options.pop("softmax_scale", q.shape[-1] ** -0.5), "softcap": softcap}
            facts |= {"window_size_left": window[0], "window_size_right": window[1]}
            facts |= {"max_seqlen_q": longest, "max_seqlen_k": longest, "cu_seqlens_q": cu, "cu_seqlens_k": cu_k}
            out, lse, _, _ = operators._flash_attn_forward(q, k, v, causal=causal, **facts, **options)
            ctx.save_for_backward(q, k, v, out, lse, cu, cu_k)
            ctx.facts, ctx.causal = {name: v for name, v in facts.items() if "cu_" not in name}, causal
            ctx.mark_non_differentiable(lse)
            return out, lse

        @staticmethod
        def backward(ctx: Any, dout: Tensor, _: Any) -> tuple[Any, ...]:
            q, k, v, out, lse, cu, cu_k = ctx.saved_tensors
            dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            operators._flash_attn_backward(
                dout, q, k, v, out, lse, cu, cu_k, dq=dq, dk=dk, dv=dv, is_causal=ctx.causal, **ctx.facts
            )
            return dq, dk, dv, None, None, None

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        window: Window = (-1, -1),
        softcap: float = 0.0,
        cu: Tensor | None = None,
        cu_k: Tensor | None = None,
        longest: int | None = None,
        return_lse: bool = False,
        **options: Any,
    ) -> Any:
        out, lse = Function.apply(
            q, k, v, cu, cu if cu_k is None else cu_k, (longest, causal, window, softcap, options)
        )
        return (out, lse) if return_lse else out

    return call


FA3, HUB = fa3(), fa3("_flash_attn3_48fe103_dirty")
"""The package, and a copy of it as a hub of kernels has it."""


# ---- the extension of flash_attn 2 ----


@torch.library.custom_op("_flash_attn_2_cuda_0a1b2c3::mha_fwd", mutates_args=())
def _extension_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out_: Tensor | None,
    alibi_slopes_: Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _no_dropout(p_dropout)
    window = window_size_left, window_size_right
    out, lse = _forward(q, k, v, None, softmax_scale, is_causal, window, softcap, alibi_slopes_)
    return out, lse, q.new_empty(0), torch.empty(2, dtype=torch.int64, device=q.device)


@_extension_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    return torch.empty_like(q), lse, q.new_empty(0), torch.empty(2, dtype=torch.int64, device=q.device)


@torch.library.custom_op("_flash_attn_2_cuda_0a1b2c3::mha_bwd", mutates_args=("dq_", "dk_", "dv_"))
def _extension_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq_: Tensor | None,
    dk_: Tensor | None,
    dv_: Tensor | None,
    alibi_slopes_: Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    rng_state: Tensor | None,
) -> Tensor:
    window = window_size_left, window_size_right
    gradients = _backward(dout, q, k, v, None, softmax_scale, is_causal, window, softcap, alibi_slopes_)
    _write((dq_, dk_, dv_), gradients)
    return softmax_lse.new_empty(softmax_lse.shape)


@_extension_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, *args: Any) -> Tensor:
    return softmax_lse.new_empty(softmax_lse.shape)


class _Extension(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, facts: Any) -> Tensor:
        out, lse, _, state = _extension_forward(q, k, v, None, None, 0.0, q.shape[-1] ** -0.5, *facts, False)
        ctx.save_for_backward(q, k, v, out, lse, state)
        ctx.facts = facts
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, state = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        scale = q.shape[-1] ** -0.5
        _extension_backward(dout, q, k, v, out, lse, dq, dk, dv, None, 0.0, scale, *ctx.facts, False, state)
        return dq, dk, dv, None


def extension(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window: Window = (-1, -1), softcap: float = 0.0
) -> Tensor:
    """A program that calls the extension by itself, as the kernels hub names it."""
    found: Tensor = _Extension.apply(q, k, v, (causal, *window, softcap))
    return found
