"""Computes packed attention in eager programs by compiling PyTorch's packed operator alone, as `attention` does."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from .. import _switch
from .attention import compiled_alone, is_replaced_on
from .determinism import DETERMINISTIC

_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""Arguments of `varlen_attn` where heads share a key head; torch 2.11 infers it from the shapes."""


class Kind(NamedTuple):
    """The properties of a call on which its compiled code depends; calls with equal `Kind` share the code.

    Attributes:
        scale, window: as of `packed_attention`.
        heads, dims: the numbers of heads, and the head dimensions, of query, key and value.
        dtype: the dtype of the query.
        device: the device of the query.
        one_tensor: whether queries and keys have the same documents, in one tensor.
        trains: whether gradients are wanted.
    """

    scale: float | None
    window: tuple[int, int]
    heads: tuple[int, ...]
    dims: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    one_tensor: bool
    trains: bool


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Computes the attention of each of several documents under deterministic algorithms, regardless of the flag.

    While dash_inductor is off, PyTorch's operator runs under the program's flag.

    Args:
        query: [tokens, heads, head dimension].
        key, value: [tokens, key heads, head dimension].
        starts_q, starts_k: int32 [documents + 1]: the first token of each document, and the end of the last one.  Only
            where both are one tensor is attention replaced.
        longest_q, longest_k: the lengths of the longest document.
        scale: the factor of the scores, by default 1 / sqrt(head dimension).
        window: (left, right) as of `attention.attention`; (-1, 0) is causal.

    Returns:
        [tokens, heads, head dimension].
    """
    tensors = query, key, value
    kind = Kind(
        scale, window, tuple(t.shape[1] for t in tensors), tuple(t.shape[2] for t in tensors), query.dtype,
        query.device, starts_q is starts_k, torch.is_grad_enabled() and any(t.requires_grad for t in tensors),
    )  # fmt: skip
    lengths = longest_q, longest_k
    if torch.compiler.is_compiling() or not _switch.is_enabled() or not is_replaced_on(query.device):
        return _written(kind, *tensors, starts_q, starts_k, *lengths)
    with DETERMINISTIC:
        found: Tensor = _compiled(kind)(*tensors, starts_q, None if kind.one_tensor else starts_k, *lengths)
    return found


@functools.cache
def _compiled(kind: Kind) -> Callable[..., Any]:
    """The compiled function of a kind."""

    def packed_attention(
        query: Tensor, key: Tensor, value: Tensor, starts_q: Tensor, starts_k: Tensor | None, *lengths: int
    ) -> Tensor:
        return _written(kind, query, key, value, starts_q, starts_q if starts_k is None else starts_k, *lengths)

    return compiled_alone(packed_attention, kind)


def _written(
    kind: Kind,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
) -> Tensor:
    """The attention as it is compiled."""
    lengths = longest_q, longest_k
    found: Any = varlen_attn(
        query, key, value, starts_q, starts_k, *lengths, scale=kind.scale, window_size=kind.window, **_GROUPED
    )
    out: Tensor = found
    return out
