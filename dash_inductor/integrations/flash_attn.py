"""Functions with the names and arguments of flash-attn's, computed by dash_inductor: for programs that call these.

    from dash_inductor.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func

in place of an import from `flash_attn`, `flash_attn_interface` (FlashAttention-3) or `flash_attn.cute`
(FlashAttention-4, which Dynamo cannot trace) is the one line to change.  The packages themselves are not needed.  The
functions run in compiled functions and in others, and need no `torch.compiler.disable`.

The result is deterministic in a program that is not compiled.  In a compiled function the attention is a part of the
graph, and as deterministic as the rest of it: if `torch.use_deterministic_algorithms` is on.

The versions of flash-attn have options in different orders, so that options are taken by name alone.  The functions
return the output alone.  FlashAttention-4 returns the log-sum-exp, too: a program that unpacks two results has to take
one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..eager.attention import attention
from ..eager.packed_attention import packed_attention
from ..errors import ArgumentError

Window = tuple[int | None, int | None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float | None = 0.0,
    learnable_sink: Tensor | None = None,
    deterministic: bool = True,
    **others: Any,
) -> Tensor:
    """Computes attention.

    Args:
        q: [batch, queries, heads, head dimension].
        k, v: [batch, keys, key heads, head dimension]; each head serves heads / key heads query heads.
        dropout_p: the dropout probability of the attention weights.
        softmax_scale: the factor of the scores, by default 1 / sqrt(head dimension).
        causal: whether queries see no later keys, counted from the ends of both.
        window_size: (left, right), how many keys before and behind its place a query sees; -1 or None for all.
        softcap: scaled scores s become ``softcap * tanh(s / softcap)``; 0 or None for none.
        learnable_sink: [heads]; an extra score in every query's softmax, without a value.
        deterministic: not read, see the module.
        others: further arguments of flash-attn, which must be None or False, and settings of its kernels (`_KERNELS`).

    Returns:
        [batch, queries, heads, head dimension].

    Raises:
        ArgumentError: an argument in `others` asks for something else.
    """
    _check(others)
    query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
    window: tuple[int, int] | None = _window(window_size, causal)
    triangle = False
    if window == (-1, -1):
        window = None
    elif window == (-1, 0) and q.shape[1] == k.shape[1]:  # no expression: it would be no bool for dynamic lengths
        triangle, window = True, None
    out = attention(
        query,
        key,
        value,
        causal=triangle,
        window=window,
        scale=softmax_scale,
        dropout=dropout_p,
        softcap=softcap or None,
        sinks=learnable_sink,
    )
    return out.transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    deterministic: bool = True,
    **others: Any,
) -> Tensor:
    """Computes the attention of each of several packed documents.

    Args:
        q: [tokens, heads, head dimension].
        k, v: [tokens, key heads, head dimension].
        cu_seqlens_q, cu_seqlens_k: int32 [documents + 1]: the first token of each document, and the end of the last.
        max_seqlen_q, max_seqlen_k: the length of the longest document; None, as FlashAttention-4 allows, for the number
            of tokens, which no document exceeds.
        dropout_p: 0, because PyTorch's packed operator has no dropout.
        softmax_scale, causal, window_size, deterministic, others: as of `flash_attn_func`.

    Returns:
        [tokens, heads, head dimension].

    Raises:
        ArgumentError: `dropout_p` is not 0, or an argument in `others` asks for something else.
    """
    _check(others)
    if dropout_p:
        raise ArgumentError("dropout_p", dropout_p, "0 with packed documents")
    starts = cu_seqlens_q, cu_seqlens_k
    longest = [x.shape[0] if given is None else int(given) for x, given in ((q, max_seqlen_q), (k, max_seqlen_k))]
    return packed_attention(q, k, v, *starts, *longest, scale=softmax_scale, window=_window(window_size, causal))


_KERNELS = ("num_splits", "pack_gqa", "sm_margin", "m_block_size", "n_block_size", "num_threads")
"""Arguments that choose among flash-attn's kernels, and change no result."""


def _check(others: dict[str, Any]) -> None:
    for name, given in others.items():
        nothing = given is None or (isinstance(given, (bool, int, float)) and not given)
        if name not in _KERNELS and not nothing:
            shown = "a tensor" if isinstance(given, Tensor) else given
            raise ArgumentError(name, shown, "None: this function does not support it")


def _window(window_size: Window, causal: bool) -> tuple[int, int]:
    left, right = (-1 if side is None else side for side in window_size)
    return left, 0 if causal else right
