"""Tensors whose elements lie far apart in reserved memory, of which pages are taken where something is written."""

from __future__ import annotations

import mmap
import random
from collections.abc import Sequence

import torch
from torch import Tensor

_NO_RESERVE = 0x4000  # MAP_NORESERVE
_MOST = 1 << 46
"""Bytes of addresses that a process may have."""
STEPS = 2**25 + 8, 2**27 + 64, 2**31 + 8, 2**32
"""Elements from one index to the next, of which few fit into 32 bits, or none."""


def far_apart(like: Tensor, rng: random.Random) -> Tensor:
    """A copy of a tensor, one of whose dimensions, with all that lie outside of it, has far strides."""
    dims = [dim for dim in range(like.dim()) if like.shape[dim] > 1]
    rng.shuffle(dims)
    if not dims:
        return like
    strides, step, far = [1] * like.dim(), 1, rng.randrange(len(dims))
    for place, dim in enumerate(dims):
        if place == far:
            room = _MOST // like.itemsize
            for other in dims[place:]:
                room //= like.shape[other]
            step = rng.choice([each for each in STEPS if each <= room])
        strides[dim] = step
        step *= like.shape[dim]
    return with_strides(like, strides)


def with_strides(like: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy of a tensor with these strides, by which no element lies where another does."""
    last = sum((size - 1) * stride for size, stride in zip(like.shape, strides, strict=True))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, (last + 1) * like.itemsize, flags=flags)
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # of which every element would take one
    return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, strides).copy_(like)
