"""A single bit that has changed is told from any other change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dash_guard.fingerprints.hashing import lanes_of
from dash_guard.fingerprints.one_bit import has_flipped


def lanes(tensor: Tensor) -> tuple[int, ...]:
    return tuple(lanes_of(tensor.view(torch.uint8)).tolist())


@pytest.mark.parametrize("size", [1, 3, 8, 1000, 1 << 20])
def test_any_single_bit_and_nothing_else(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    before = torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
    for trial in range(40 if size <= 1000 else 4):
        place, bit = int(torch.randint(size, (1,), generator=generator)), trial % 8
        after = before.clone()
        after[place] ^= 1 << bit
        assert has_flipped(after, lanes(before), lanes(after)) is True
        assert has_flipped(before, lanes(before), lanes(after)) is None, "it has changed back"
        other = after.clone()
        other[(place + 1) % size] ^= 1 << (bit + 1) % 8
        assert has_flipped(other, lanes(before), lanes(other)) is False
    scaled = torch.randn(size, generator=generator)
    assert has_flipped((scaled * 0.9).view(torch.uint8), lanes(scaled), lanes(scaled * 0.9)) is False
