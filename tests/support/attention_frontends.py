"""Ways into attention, each a program with its tensors, which it may write to between a forward and its backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from . import by_hand
from .packed import GROUPED, packed_attention

LENGTH, HEADS, DIM = 33, 2, 16
Make = Callable[..., Tensor]


@dataclass(frozen=True)
class Entry:
    """One way into attention.

    Args:
        function: takes the tensors of `tensors` in their order.
        tensors: makes them, from a function that makes normal numbers of a shape, and their device.
        copied: the names of those that eager attention has copied when its backward runs.
        exact: the same by other operators, where PyTorch has no kernels for the CPU.
    """

    function: Callable[..., Tensor]
    tensors: Callable[[Make, str], dict[str, Tensor]]
    copied: tuple[str, ...] = ()
    exact: Callable[..., Tensor] | None = None


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of [batch, length, heads, dim], as models have it."""
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, attn_mask=mask, is_causal=mask is None)


def _qkv(make: Make, kv_heads: int = HEADS) -> dict[str, Tensor]:
    return {
        "q": make(2, LENGTH, HEADS, DIM),
        "k": make(2, LENGTH, kv_heads, DIM),
        "v": make(2, LENGTH, kv_heads, DIM),
    }


def _fused(x: Tensor) -> Tensor:
    q, k, v = x.split(1, 2)
    return _attend(q[:, :, 0], k[:, :, 0], v[:, :, 0])


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def repeat(x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        batch, heads, length, dim = x.shape
        return x[:, :, None].expand(batch, heads, 2, length, dim).reshape(batch, 2 * heads, length, dim)

    return F.scaled_dot_product_attention(q.transpose(1, 2), repeat(k), repeat(v), is_causal=True)


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)


def _flags(make: Make, *shape: int) -> Tensor:
    """Truth values, of which the last along the last dimension is true."""
    found = make(*shape).detach() < 0.3
    found[..., -1] = True
    return found


def _as_floats(q: Tensor, k: Tensor, v: Tensor, pairs: Tensor) -> Tensor:
    return _attend(q, k, v, torch.where(pairs, 0.0, -torch.inf).to(q.dtype))


def _documents(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    place = torch.arange(ids.shape[1], device=ids.device)
    same = ids[:, None, :, None] == ids[:, None, None, :]
    return _attend(q, k, v, same & (place <= place[:, None]))


def _from_starts(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
    place = torch.arange(starts.shape[1], device=starts.device)
    return _attend(q, k, v, ((place <= place[:, None]) & (place >= starts[:, :, None]))[:, None])


def _ordered(q: Tensor, k: Tensor, v: Tensor, numbers: Tensor) -> Tensor:
    return _attend(q, k, v, numbers[:, None, None] <= numbers[:, None, :, None])


def _packed(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
    return varlen_attn(q, k, v, starts, starts, LENGTH, LENGTH, window_size=(-1, 0), **GROUPED)


def _plain_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return by_hand.plain(*(t.transpose(1, 2) for t in (q, k, v)))


def _sinks_by_hand(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    return by_hand.sinks(*(t.transpose(1, 2) for t in (q, k, v)), sink)


def _keys_by_hand(q: Tensor, k: Tensor, v: Tensor, keys: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = (q @ k.mT).masked_fill(~keys[:, None, None, :LENGTH], -torch.inf)
    return scores.softmax(-1) @ v


def _starts(device: str) -> Tensor:
    return torch.tensor([0, 7, 20, LENGTH], dtype=torch.int32, device=device)


ENTRIES = {
    "returned as a view": Entry(
        lambda q, k, v: _attend(q, k, v).transpose(1, 2).flatten(2), lambda make, device: _qkv(make)
    ),
    "plain": Entry(_attend, lambda make, device: _qkv(make)),
    "fused": Entry(_fused, lambda make, device: {"x": make(2, LENGTH, 3, HEADS, DIM)}),
    "repeated": Entry(_repeated, lambda make, device: _qkv(make, HEADS // 2)),
    "grouped": Entry(_grouped, lambda make, device: _qkv(make, HEADS // 2)),
    "keys": Entry(
        lambda q, k, v, keys: _attend(q, k, v, keys[:, None, None, :LENGTH]),
        lambda make, device: _qkv(make) | {"keys": _flags(make, 2, LENGTH + 3)},
        copied=("keys",),
    ),
    "pairs": Entry(
        _attend, lambda make, device: _qkv(make) | {"pairs": _flags(make, LENGTH, LENGTH)}, copied=("pairs",)
    ),
    "pairs as floats": Entry(
        _as_floats, lambda make, device: _qkv(make) | {"pairs": _flags(make, 2, 1, LENGTH, LENGTH)}, copied=("pairs",)
    ),
    "documents": Entry(
        _documents,
        lambda make, device: _qkv(make) | {"ids": torch.arange(2 * LENGTH, device=device).view(2, LENGTH) // 9},
        copied=("ids",),
    ),
    "document starts": Entry(
        _from_starts,
        lambda make, device: _qkv(make) | {"starts": torch.arange(LENGTH, device=device).repeat(2, 1) // 9 * 9},
        copied=("starts",),
    ),
    "ordered numbers": Entry(
        _ordered,
        lambda make, device: _qkv(make) | {"numbers": torch.arange(2 * LENGTH, device=device).view(2, LENGTH) % 5},
        copied=("numbers",),
    ),
    "bias": Entry(_attend, lambda make, device: _qkv(make) | {"bias": make(1, HEADS, LENGTH, LENGTH).detach()}),
    "by hand": Entry(_plain_by_hand, lambda make, device: _qkv(make)),
    "sinks by hand": Entry(_sinks_by_hand, lambda make, device: _qkv(make, HEADS // 2) | {"sink": make(HEADS)}),
    "keys by hand": Entry(
        _keys_by_hand,
        lambda make, device: _qkv(make) | {"keys": _flags(make, 2, LENGTH + 3)},
        copied=("keys",),
    ),
    "packed": Entry(
        _packed,
        lambda make, device: {
            "q": make(LENGTH, HEADS, DIM), "k": make(LENGTH, 1, DIM), "v": make(LENGTH, 1, DIM),
            "starts": _starts(device),
        },
        exact=lambda q, k, v, starts: packed_attention(q, k, v, starts, (-1, 0)),
    ),
}  # fmt: skip


def tensors_of(entry: Entry, device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Reproducible tensors; tensors of floats that are no masks want gradients."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    return entry.tensors(make, device)
