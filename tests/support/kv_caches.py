"""Key/value caches of random sequences, and a model whose products and norms have the bits of a row alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dash_inductor.integrations.flash_attn import flash_attn_func, flash_attn_with_kvcache

HEADS, KEY_HEADS = 8, 2
ROWS = 64
"""Rows of every product and norm of `in_equal_chunks`."""


def sequences(
    batch: int, longest: int, dim: int, dtype: torch.dtype, device: str, key_heads: int = KEY_HEADS
) -> list[Tensor]:
    """Query, key and value of sequences that train: [batch, longest, heads, head dimension]."""
    generator = torch.Generator(device).manual_seed(longest)
    return [
        torch.randn(batch, longest, heads, dim, generator=generator, device=device, dtype=dtype).requires_grad_()
        for heads in (HEADS, key_heads, key_heads)
    ]


class Pages:
    """The blocks of sequences of these lengths, in any order.

    Attributes:
        size: of a block, in tokens.
        count: of the blocks, of which some belong to no sequence.
        table: int32 [batch, blocks of a sequence]; any numbers behind the last block of a sequence.
    """

    def __init__(self, lengths: Sequence[int], size: int, device: str) -> None:
        numbers = random.Random(size)
        needed = [-(-length // size) for length in lengths]
        self.size, self.count = size, sum(needed) + 3
        blocks = numbers.sample(range(self.count), sum(needed))
        rows = [
            [blocks.pop() if i < count else numbers.randint(-9, 1 << 30) for i in range(max(needed) + 1)]
            for count in needed
        ]
        self.table = torch.tensor(rows, dtype=torch.int32, device=device)

    def cache(self, whole: Tensor, lengths: Sequence[int]) -> Tensor:
        """A cache of these first tokens of sequences [batch, longest, heads, head dimension]; the rest is NaN."""
        found = torch.full((self.count, self.size, *whole.shape[2:]), torch.nan, dtype=whole.dtype, device=whole.device)
        for b, length in enumerate(lengths):
            for block, part in zip(self.table[b].tolist(), whole[b, :length].split(self.size), strict=False):
                found[block, : len(part)] = part
        return found


def contiguous(whole: Tensor, lengths: Sequence[int]) -> Tensor:
    """As `Pages.cache`, but a cache [batch, longest, heads, head dimension]."""
    found = torch.full_like(whole, torch.nan)
    for b, length in enumerate(lengths):
        found[b, :length] = whole[b, :length]
    return found


def check_bits(
    lengths: Sequence[int],
    queries: int,
    size: int | None,
    dim: int,
    dtype: torch.dtype,
    device: str,
    *,
    key_heads: int = KEY_HEADS,
    run: Callable[..., Tensor] = flash_attn_with_kvcache,
    **options: Any,
) -> None:
    """The last queries of each sequence, over a cache, have the bits of a forward that trains on longer sequences.

    Sequences alone have them, too, and so have queries whose keys are written to the cache in the same call.

    Args:
        lengths: of the sequences.
        size: of a block; None for a contiguous cache.
        key_heads: heads of keys and values; there are HEADS query heads.
        run: `flash_attn_with_kvcache`, or a compiled function that calls it.
        options: further arguments of it, and of `flash_attn_func`.
    """
    tensors = sequences(len(lengths), max(lengths) + 7, dim, dtype, device, key_heads)
    trained = flash_attn_func(*tensors, **options)
    assert trained.requires_grad
    whole = [t.detach() for t in (*tensors, trained)]
    query, key, value, expected = (torch.stack([t[b, n - queries : n] for b, n in enumerate(lengths)]) for t in whole)
    pages = None if size is None else Pages(lengths, size, device)
    make = contiguous if pages is None else pages.cache
    table = None if pages is None else pages.table
    caches = [make(t, lengths) for t in whole[1:3]]
    counts = torch.tensor(lengths, dtype=torch.int32, device=device)
    assert torch.equal(run(query, *caches, cache_seqlens=counts, block_table=table, **options), expected)
    for b, length in enumerate(lengths):
        one = slice(b, b + 1)
        alone = [cache[one] for cache in caches] if table is None else caches
        found = run(
            query[one], *alone, cache_seqlens=length, block_table=None if table is None else table[one], **options
        )
        assert torch.equal(found, expected[one]), length
    grown = [make(t, [length - queries for length in lengths]) for t in whole[1:3]]
    found = run(query, *grown, key, value, cache_seqlens=counts - queries, block_table=table, **options)
    assert torch.equal(found, expected)
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(grown, caches, strict=True))


def in_equal_chunks(model: nn.Module) -> None:
    """Lets products and norms of a model run in chunks of ROWS rows, so that a row has the same bits beside any others.

    Libraries choose kernels by the number of rows, which is always the same now.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear) or type(module).__name__.endswith("RMSNorm"):
            module.forward = _chunked(module.forward)  # type: ignore[method-assign]


def _chunked(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        padded = F.pad(rows, (0, 0, 0, -len(rows) % ROWS))
        found = torch.cat([function(part.clone()) for part in padded.split(ROWS)])
        return found[: len(rows)].reshape(*x.shape[:-1], -1)

    return forward


class PagedGeneration:
    """The attention function of a model of transformers that keeps keys and values in blocks.

    Args:
        layers: of the model.
        lengths: the most tokens of each sequence.
        size: of a block.
        like: a tensor with the dtype and the device of the caches, and the head dimension as its last dimension.
    """

    def __init__(self, layers: int, lengths: Sequence[int], size: int, like: Tensor, key_heads: int) -> None:
        self.pages = Pages(lengths, size, str(like.device))
        shape = self.pages.count, size, key_heads, like.shape[-1]
        self._caches = [[like.new_full(shape, torch.nan) for _ in "kv"] for _ in range(layers)]
        self.rows = slice(0, len(lengths))
        """The sequences of the next call."""
        self.lengths = torch.zeros(len(lengths), dtype=torch.int32, device=like.device)
        """Tokens of each sequence so far."""

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scaling: float, **others: Any
    ) -> tuple[Tensor, None]:
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        table, lengths = self.pages.table[self.rows], self.lengths[self.rows]
        k_cache, v_cache = self._caches[module.layer_idx]
        out = flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table, softmax_scale=scaling,
            causal=True,
        )  # fmt: skip
        return out, None
