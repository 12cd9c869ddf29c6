"""Tensors whose elements lie far apart in memory that is reserved, and taken page by page where something is written."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_NO_RESERVE = 0x4000  # MAP_NORESERVE


def far_apart(like: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy of a tensor with these strides, in elements, of which none repeats an element; around them are zeros."""
    last = sum((size - 1) * stride for size, stride in zip(like.shape, strides, strict=True))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, (last + 1) * like.itemsize, flags=flags)
    # not huge pages, of which each element would take one
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    found = torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, strides)
    return found.copy_(like)
