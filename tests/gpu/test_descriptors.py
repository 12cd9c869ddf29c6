"""TMA descriptors that are made from others are those that the driver encodes."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from dash_inductor.kernels.common import launcher

from ..support.hopper import MARKS

pytestmark = MARKS

SHAPES = [
    ([512], [1], [128]),
    ([4096, 32], [32, 1], [1, 32]),
    ([8, 4096, 128], [524288, 128, 1], [1, 64, 64]),
    ([2, 4, 300, 64], [76800, 64, 256, 1], [1, 1, 128, 64]),
    ([3, 1, 77, 192], [14784, 14784, 192, 1], [1, 1, 77, 32]),
]


@pytest.mark.parametrize(("shape", "strides", "tile"), SHAPES)
@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])
def test_descriptors(shape: list[int], strides: list[int], tile: list[int], swizzle: int) -> None:
    torch.zeros(1, device="cuda")
    tile = [*tile[:-1], min(tile[-1], (16 << swizzle) // 2)] if swizzle else tile
    meta: dict[str, Any] = {
        "fp4_padded": False, "elem_size": 2, "elem_type": 10, "swizzle": swizzle, "block_size": tile,
    }  # fmt: skip
    made, encoded = [launcher._Map(shape, strides, meta, torch.cuda.current_device()) for _ in range(2)]
    encoded.behind_address = b""  # always by the driver
    base = torch.empty(1 << 24, dtype=torch.uint8, device="cuda").data_ptr()
    for address in [
        base,
        *(base + (16 << bit) for bit in range(20)),
        16,
        (1 << 47) - 16,
        *(16 << b for b in range(43)),
    ]:
        found = []
        for map_ in (made, encoded):
            memory = ctypes.create_string_buffer(256)
            place = -ctypes.addressof(memory) % 64
            map_.write(memory, place, address)
            found.append(memory.raw[place : place + 128])
        assert found[0] == found[1]
    assert made.behind_address is not None
    assert len(made.behind_address) == 120  # so that the driver was asked only at first
