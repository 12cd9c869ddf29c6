"""Bitwise comparison of many runs on the GPU, idle or under load: the harness that the negative control must fail."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_INTEGERS = {2: torch.int16, 4: torch.int32}


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bit patterns, so that NaN equals itself and 0.0 differs from -0.0."""
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def differing_runs(
    run: Callable[[], Sequence[Tensor]], count: int, *, load: bool = False, poisoned: bool = False
) -> int:
    """How many of `count` runs differ in any bit from the first.

    Args:
        load: matmuls of another stream take SMs away all the while.
        poisoned: memory that the run may be given was filled with NaN before.
    """
    first = [bits(t).clone() for t in run()]
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    stream = torch.cuda.Stream()
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(a)  # perhaps where a gradient of the first run lay: that run has to be over
    stream.wait_stream(torch.cuda.current_stream())
    for i in range(count):
        if load:
            with torch.cuda.stream(stream):
                for _ in range(1 + i % 3):  # not in step with the runs
                    torch.mm(a, a, out=product)
        if poisoned:
            poison()
        different = torch.zeros((), dtype=torch.bool, device="cuda")
        for tensor, expected in zip(run(), first, strict=True):
            different |= (bits(tensor) != expected).any()
        differing += different
    torch.cuda.synchronize()
    return int(differing)


def poison() -> None:
    """Fill free cached memory with NaN patterns (0xff): blocks of several sizes, given back at once."""
    blocks = [
        torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for size in (1 << 16, 1 << 20, 1 << 24, 1 << 26)
    ]
    del blocks


def digest(tensors: Sequence[Tensor]) -> str:
    """sha256 of the bits."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(bits(tensor).cpu().numpy().tobytes())
    return sha.hexdigest()
