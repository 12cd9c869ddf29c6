"""Tensor checks and TMA descriptors for the launchers of the Hopper forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....errors import ArgumentError
from ....model.attention_spec import AttentionSpec
from ....model.mask import ROW_BLOCK
from ....model.site import DType, Site
from ....schedule.tile_schedule import ClosedForm, Problem

DTYPES: dict[torch.dtype, DType] = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


Places = tuple[int | None, ...]
"""For each tensor of a group its index in the operator's extras, None if it is absent."""


def taken(extras: Sequence[Tensor], places: Places) -> list[Any]:
    """Returns the extras at these indices as a list, with None for each index that is None."""
    return [None if place is None else extras[place] for place in places]


def site_of(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, extras: Sequence[Tensor]) -> Site:
    """Returns the attention site of a call with these tensors; with a packed mask its lengths count padded rows.

    Args:
        query, key, value: [batch, heads, length, head dim].

    Raises:
        ArgumentError: dtypes, devices or shapes are not allowed or do not fit one another.
    """
    tensors = query, key, value
    shapes, dtypes = tuple(tuple(t.shape) for t in tensors), tuple(t.dtype for t in tensors)
    if any(len(shape) != 4 for shape in shapes):
        raise ArgumentError("query, key, value", shapes, "[batch, heads, length, head dim]")
    q, k, v = shapes
    if q[0] != k[0] or q[3] != k[3]:
        raise ArgumentError("key", k, f"[{q[0]}, kv heads, kv_len, {q[3]}], as query has it")
    if k[:3] != v[:3]:
        raise ArgumentError("value", v, f"{[*k[:3]]} and the value dim, as key has it")
    if not k[1] or q[1] % k[1]:
        raise ArgumentError("query", q, f"a multiple of the {k[1]} heads of key")
    if dtypes[0] not in DTYPES or len({*dtypes}) > 1:
        raise ArgumentError("dtypes of query, key, value", dtypes, "float16 or bfloat16, the same for all")
    if len({t.device for t in tensors}) > 1:
        devices = tuple(str(t.device) for t in tensors)
        raise ArgumentError("devices of query, key, value", devices, "the same for all")
    q_len, kv_len, varlen_layout = q[2], k[2], spec.mask.varlen_layout
    if varlen_layout is not None:
        if q[0] != 1 or q_len != kv_len:
            raise ArgumentError("query, key", (q, k), "one batch element, with as many of both")
        q_len = kv_len = ROW_BLOCK * len(extras[varlen_layout.token_offset.index])
    return Site("cuda", DTYPES[dtypes[0]], q[0], q[1], k[1], q_len, kv_len, q[3], v[3], spec)


def problem_of(site: Site, block_q: int, block_kv: int, head_chunk: int = 1) -> Problem:
    """Returns the `Problem` (band, lengths, tile sizes, batch, query heads) of a site whose sizes are all known."""
    assert site.batch is not None
    assert site.q_len is not None
    assert site.kv_len is not None
    return Problem(
        site.band, site.q_len, site.kv_len, block_q, block_kv, site.batch, site.q_heads, head_chunk=head_chunk
    )  # fmt: skip


def seen(tile_schedule: ClosedForm, spec: AttentionSpec, tokens: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns (first, end) of the queries that see some key, and (first, end) of the keys that some query sees.

    With a packed mask both are all tokens.
    """
    if spec.mask.varlen_layout is not None:  # every token sees itself
        return (0, tokens), (0, tokens)
    return tile_schedule.seen_rows, tile_schedule.seen_keys


def check_data(
    name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, dense: bool = True
) -> None:
    """Raises ArgumentError unless a tensor that a mask reads has this shape, dtype and device.

    Args:
        dense: whether the tensor must be contiguous; if not, it may have size 1 along any dimension.
    """
    found = tuple(tensor.shape)
    sizes = tuple(shape) if dense else tuple(1 if n == 1 else full for n, full in zip(found, shape, strict=False))
    fits = found == sizes and len(found) == len(shape) and (tensor.is_contiguous() or not dense)
    if not fits or (tensor.dtype, tensor.device) != (dtype, device):
        allowed = f"{dtype} {tuple(shape)}, {'contiguous' if dense else 'or of size 1'}, on {device}"
        given = tensor.dtype, found, tensor.stride(), str(tensor.device)
        raise ArgumentError(f"data.{name}", given, allowed)


def broadcast_strides(tensor: Tensor) -> tuple[int, ...]:
    """Returns the strides of a tensor in elements, 0 along dimensions of size 1."""
    return tuple(0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def readable(tensor: Tensor) -> Tensor:
    """Returns `tensor` itself if TMA can read it, else a contiguous copy.

    TMA needs unit stride in the last dimension, and rows that begin at multiples of 16 bytes.

    Raises:
        ArgumentError: TMA could not read a copy either, because the head dim is not a multiple of 8.
    """
    if not tensor.data_ptr() % 16 and has_readable_strides(tensor.shape, tensor.stride()):
        return tensor
    if tensor.shape[-1] % 8:
        raise ArgumentError("head dim", tensor.shape[-1], "a multiple of 8")
    return tensor.clone(memory_format=torch.contiguous_format)


def has_readable_strides(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns whether TMA can read a 16-bit tensor with these strides, in elements.

    The last stride must be 1, and all others multiples of 8 elements (16 bytes), except along dimensions of size 1.
    """
    *outer, column = strides
    steps = [stride for size, stride in zip(shape, outer, strict=False) if size != 1]
    return column == 1 and all(step > 0 and not step % 8 for step in steps)


class SeenRows(NamedTuple):
    """The rows of q, do, k or v that take part in attention, as a TMA descriptor; TMA reads zeros outside of it.

    Args:
        descriptor: (shape, strides) of the rows, in elements.
        skipped: byte offset of the first of these rows within a head.
    """

    descriptor: tuple[list[int], list[int]]
    skipped: int

    @staticmethod
    def of(tensor: Tensor, first: int, end: int) -> SeenRows:
        """Returns the rows ``first .. end - 1`` of each head of a tensor [batch, heads, length, head dim].

        If there are none, the descriptor has one row, which is never read.
        """
        if end <= first:
            first, end = 0, 1
        shape, strides = tensor.shape, tensor.stride()
        return SeenRows(describe((*shape[:2], end - first, shape[3]), strides), 2 * first * strides[2])


def describe(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns the (shape, strides) of a TMA descriptor for a tensor with unit stride in its last dimension.

    A dimension of size 1 gets stride 8, because TMA requires multiples of 16 bytes for it, too.
    """
    return list(shape), [8 if size == 1 else stride for size, stride in zip(shape[:3], strides, strict=False)] + [1]
