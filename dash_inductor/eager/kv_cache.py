"""Attention of queries over a key/value cache, contiguous or paged, with the bits of a forward over all tokens.

The keys that a query sees depend on lengths that are data.  So the mask is one of key ranges (`Interval`), with which
the forward never splits keys: the main kernel runs, as in training.  The query heads of a key head are rows of one
tile, which reads the keys once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import attention
from .lazy_mask import LazyMask
from .mask_functions import Made, MaskFunction, Operand, program


def write(cache: Tensor, new: Tensor, lengths: Tensor, entries: Tensor | None, block_table: Tensor | None) -> None:
    """Writes keys or values of new tokens to a cache, in place, after what it holds.

    Args:
        cache: [entries, longest, key heads, head dimension], or with a block table [blocks, block size, key heads, head
            dimension].
        new: [batch, new tokens, key heads, head dimension].
        lengths: int32 [batch], how many tokens each sequence has without the new ones.
        entries: integers [batch], the entry of the cache of each sequence; None if they are in order.
        block_table: integers [batch, blocks of a sequence]; None if the cache has none.
    """
    places = lengths[:, None] + torch.arange(new.shape[1], device=new.device, dtype=lengths.dtype)
    if block_table is not None:
        size = cache.shape[1]
        places, rows = places % size, block_table.gather(1, (places // size).long())
    else:
        rows = torch.arange(new.shape[0], device=new.device) if entries is None else entries
        rows = rows[:, None].expand_as(places)
    cache[rows.long(), places.long()] = new


def cached_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lengths: Tensor,
    *,
    entries: Tensor | None = None,
    block_table: Tensor | None = None,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Computes attention of the last tokens of sequences over the sequences, which are in a cache.

    Nothing is read from the device.  The blocks of a paged cache, or the entries, are copied to tensors of their own,
    in the order of the sequences.  What the cache has past a length may be NaN, and entries of the block table past the
    last block may be any number.

    Args:
        query: [batch, queries, heads, head dimension].
        key_cache, value_cache: as `cache` of `write`.
        lengths: int32 [batch], tokens of each sequence, of which the queries are the last ones.
        entries, block_table: as of `write`.
        window: (left, right), how many keys before and after its own position a query sees; -1 for all.
        scale, softcap: as of `attention.attention`.

    Returns:
        [batch, queries, heads, head dimension of the value]; zeros where a query sees no key.
    """
    batch, queries, heads, _ = query.shape
    keys, values = (_in_order(cache, entries, block_table) for cache in (key_cache, value_cache))
    key_heads = keys.shape[2]
    group = heads // key_heads
    rows = query.transpose(1, 2).reshape(batch, key_heads, group * queries, -1)
    operands = [bound.repeat(1, group) for bound in _ranges(lengths, queries, window)]
    if group * queries == 1:  # ranges of one row would be read as a mask of keys, or as a bias beside a softcap
        rows, operands = rows.expand(-1, -1, 2, -1), [bound.repeat(1, 2) for bound in operands]
    seen = _UP_TO if len(operands) == 1 else _BETWEEN
    shape = batch, 1, rows.shape[2], keys.shape[1]
    mask: Tensor
    if torch.compiler.is_compiling():
        mask = seen(operands, shape, query.device)
    else:
        mask = LazyMask(seen, tuple(operands), shape, query.device)
    out = attention(rows, keys.transpose(1, 2), values.transpose(1, 2), mask, scale=scale, softcap=softcap)
    return out[:, :, : group * queries].reshape(batch, heads, queries, -1).transpose(1, 2)


def _in_order(cache: Tensor, entries: Tensor | None, block_table: Tensor | None) -> Tensor:
    """The keys or values of each sequence: [batch, longest, key heads, head dimension]."""
    if block_table is not None:
        blocks = block_table.clamp(0, cache.shape[0] - 1).flatten()
        gathered: Tensor = cache.index_select(0, blocks).unflatten(0, block_table.shape)
        return gathered.flatten(1, 2)
    return cache if entries is None else cache.index_select(0, entries)


def _ranges(lengths: Tensor, queries: int, window: tuple[int, int]) -> list[Tensor]:
    """The first key that each query sees, if there is a limit, and the last one: integers [batch, queries]."""
    left, right = window
    places = lengths[:, None] - queries + torch.arange(queries, device=lengths.device, dtype=lengths.dtype)
    last = lengths[:, None] - 1
    last = last.expand_as(places) if right < 0 else torch.minimum(places + right, last)
    return [last] if left < 0 else [places - left, last]


def _up_to(last: Tensor) -> MaskFunction:
    """A mask of the keys up to a position, integers [batch, queries]."""

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= last[batch, query]

    return mask


def _between(first: Tensor, last: Tensor) -> MaskFunction:
    """A mask of the keys between two positions, integers [batch, queries]."""

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first[batch, query]) & (key <= last[batch, query])

    return mask


_UP_TO = program(Made(_up_to, (Operand(0),)), from_the_end=False)
_BETWEEN = program(Made(_between, (Operand(0), Operand(1))), from_the_end=False)
