"""A document among others: the same tokens at another place, with other neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dash_inductor.model.mask import ALIGNMENT

from .keyed import KeyedAttention

TILE = ALIGNMENT
"""A document whose first token is a multiple of it has the same bits wherever it lies; no tile is larger."""
OTHERS = 5 * TILE
"""Tokens of the others, so that few shapes are compiled."""
PLACES = (0, 3, 5)
"""The beginning of a document, in tiles: first, between others, and last; if it is not last, it ends within a tile."""


def among(
    p: KeyedAttention, before: int, *, others: int = OTHERS, seed: int = 1, factor: float = 1.0
) -> KeyedAttention:
    """The document `p`, as many queries as keys, behind `before` of so many tokens of others.

    The others are cut at random places, their ids are in no order, and their values are random, times `factor`.
    """
    (batch, heads, length, dim), (_, kv_heads, _, value_dim) = p.q.shape, p.v.shape
    assert p.k.shape[2] == length
    end, whole = before + length, others + length
    other = KeyedAttention.random(
        whole, whole, p.mask, dims=(dim, value_dim), batch=batch, kv_heads=kv_heads, group=heads // kv_heads,
        dtype=p.q.dtype, scale=p.scale, seed=seed, device=str(p.q.device),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    begins = torch.rand(batch, whole, generator=generator) < 0.02
    begins[:, before:end] = False
    begins[:, [before, *([end] if end < whole else [])]] = True
    ids = torch.randperm(whole + 1, generator=generator)[begins.cumsum(1)].to(p.q.device)

    def placed(own: Tensor, neighbours: Tensor) -> Tensor:
        tensor = neighbours * factor
        tensor[:, :, before:end] = own
        return tensor

    q, k, v, do = map(placed, (p.q, p.k, p.v, p.do), (other.q, other.k, other.v, other.do))
    return replace(p, q=q, k=k, v=v, do=do, segments=(ids, ids))


def of_document(results: Sequence[Tensor], before: int, length: int) -> list[Tensor]:
    """The part of out, log-sum-exp and gradients that belongs to a document."""
    return [t[:, :, before : before + length] for t in results]
