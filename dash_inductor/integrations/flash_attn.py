"""Functions with the names and arguments of flash-attn's, computed by dash_inductor: for programs that call these.

    from dash_inductor.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

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

import torch
from torch import Tensor

from ..eager.attention import attention
from ..eager.kv_cache import cached_attention, write
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
        q: [batch, queries, heads, head dimension]; float16, bfloat16 or float32 to be replaced.
        k, v: [batch, keys, key heads, head dimension], with the dtype of q; each head serves heads / key heads query
            heads.
        dropout_p: the dropout probability of the attention weights.
        softmax_scale: the factor of the scores, by default 1 / sqrt(head dimension).
        causal: whether queries see no later keys, counted from the ends of both.
        window_size: (left, right), how many keys before and after its position a query sees; -1 or None for all.
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


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float | None = 0.0,
    rotary_interleaved: bool = True,
    **others: Any,
) -> Tensor:
    """Computes the attention of the last tokens of sequences over a key/value cache; there is no gradient.

    Each query has the bits that it has in a forward over its whole sequence by `flash_attn_func` with the same mask,
    from any cache and together with any other sequences.  That holds for the Hopper kernels (sm_90, 16 bits, head
    dimensions that are multiples of 8 up to 256) and the CPU's reference executor; other kernels have not been
    compared.  Nothing is read from the device, and entries past the lengths do not matter, even if they are NaN.

    Args:
        q: [batch, queries, heads, head dimension]; the queries are the last tokens of each sequence.
        k_cache, v_cache: [batch, longest, key heads, head dimension], read in place; or with a block table [blocks,
            block size, key heads, head dimension], of which all blocks that the table names are copied, so that a
            narrow table saves time.
        k, v: keys and values of new tokens, [batch, new tokens, key heads, head dimension], which are written to the
            caches first, in place, from `cache_seqlens` on.
        cache_seqlens: int32 [batch], or a number for all: tokens of each sequence in the cache, without the new ones;
            None for the whole cache.  With the new ones, they must fit the cache; only a number is checked.
        cache_batch_idx: integers [batch]: the entry of the caches of each sequence; these entries are copied.
        block_table: int32 [batch, blocks of a sequence]: the blocks of each sequence; any numbers past its length.
        softmax_scale, causal, window_size, softcap, others: as of `flash_attn_func`.
        rotary_interleaved: not read, since rotary embeddings are not supported.

    Returns:
        [batch, queries, heads, head dimension]; zeros where a query sees no key.

    Raises:
        ArgumentError: an argument in `others` asks for something else, or arguments do not belong together.
    """
    _check(others)
    batch = q.shape[0]
    if (k is None) != (v is None):
        raise ArgumentError("k, v", [None if t is None else tuple(t.shape) for t in (k, v)], "both or neither")
    if k is not None and cache_seqlens is None:
        raise ArgumentError("cache_seqlens", None, "the lengths after which k and v are written")
    if block_table is not None and cache_batch_idx is not None:
        raise ArgumentError("cache_batch_idx", tuple(cache_batch_idx.shape), "None with a block_table")
    by_sequence = {"block_table": block_table, "cache_batch_idx": cache_batch_idx, "k_cache": k_cache}
    name, rows = next((name, tensor) for name, tensor in by_sequence.items() if tensor is not None)
    if rows.shape[0] != batch:
        raise ArgumentError(name, tuple(rows.shape), f"a tensor of {batch} sequences, as q has")
    if q.shape[2] % k_cache.shape[2]:
        raise ArgumentError("q", tuple(q.shape), f"a multiple of {k_cache.shape[2]} heads, as k_cache has")
    if isinstance(cache_seqlens, Tensor):
        if cache_seqlens.shape != (batch,):
            raise ArgumentError("cache_seqlens", tuple(cache_seqlens.shape), f"a number or a tensor [{batch}]")
        lengths = cache_seqlens.to(torch.int32)
    else:
        capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
        length = capacity if cache_seqlens is None else cache_seqlens
        most = capacity - (0 if k is None else k.shape[1])
        if not 0 <= length <= most:
            raise ArgumentError("cache_seqlens", length, f"a number from 0 to {most}, for which the cache has room")
        lengths = torch.full((batch,), length, dtype=torch.int32, device=q.device)
    with torch.no_grad():
        if k is not None and v is not None:
            for cache, new in ((k_cache, k), (v_cache, v)):
                write(cache, new, lengths, cache_batch_idx, block_table)
            lengths = lengths + k.shape[1]
        return cached_attention(
            q,
            k_cache,
            v_cache,
            lengths,
            entries=cache_batch_idx,
            block_table=block_table,
            window=_window(window_size, causal),
            scale=softmax_scale,
            softcap=softcap or None,
        )


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
