"""The layouts of the states of PyTorch's random number generators."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import torch

_CPU = struct.Struct("<QiiQ624Q")
"""The seed, how many words are left before new ones are made plus one, a flag, the index, and the words."""


def mt19937_of_cpu() -> tuple[tuple[int, ...], int]:
    """The 624 words of the CPU's generator, and the index of the next one, 624 if new ones are made first."""
    _, left, _, index, *words = _CPU.unpack_from(torch.get_rng_state().numpy().tobytes())
    return tuple(words), 624 if left == 1 else index


def philox_of_devices() -> Iterator[tuple[int, int, int]]:
    """Yields the index, seed and offset of the generator of each device that this process uses; waits for none.

    While a CUDA graph is captured, PyTorch does not tell the offsets: nothing is yielded.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return
    for module in (torch.cuda, torch.xpu):
        if module.is_available() and module.is_initialized():
            for index, generator in enumerate(module.default_generators):
                yield index, generator.initial_seed(), generator.get_offset()
