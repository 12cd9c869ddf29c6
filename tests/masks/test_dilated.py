"""Dilated masks read back from graphs: steps, remainders, offsets and bands drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ..support.mask_graphs import assert_components_are_the_mask, read_graph, read_mask, trace_mask
from .test_recognition import columns, rows

Make = Callable[[Tensor, Tensor], Tensor]


def drawn(rng: random.Random) -> tuple[Make, str]:
    """A mask, and the text of its components."""
    step, offset, sign = rng.choice((2, 3, 5, 64, 100)), rng.choice((0, 0, 7, -13)), rng.choice((1, -1))
    remainder, divisor = rng.choice((0, 0, 1, step - 1)), rng.choice((step, step, -step))
    bottom_right = rng.random() < 0.3
    band = rng.choice(("", "causal", "band(0,8)"))

    def make(q: Tensor, k: Tensor) -> Tensor:
        distance = rows(q) - columns(k) + (k.shape[2] - q.shape[2] if bottom_right else 0)
        expected = remainder + (divisor if divisor < 0 < remainder else 0)
        shown = (sign * distance + offset) % divisor == expected
        if band:
            shown = shown & (rows(q) >= columns(k))
        return shown & (rows(q) - columns(k) < 9) if band.startswith("band") else shown

    return make, f"{band} & dilated" if band else "dilated"


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("seed", range(20))
def test_drawn_masks(seed: int, dynamic: bool) -> None:
    make, text = drawn(random.Random(seed))
    module = trace_mask(make, q_len=20, kv_len=27, dynamic=dynamic)
    found = read_graph(module)
    assert (str(found.components), found.reason) == (text, None)
    assert found.components is not None
    for q_len, kv_len in ((20, 27), (31, 17), (9, 130)) if dynamic else ((20, 27),):
        q, k = (torch.zeros(3, 2, length, 4) for length in (q_len, kv_len))
        assert_components_are_the_mask(module, found.components, q, k)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda q, k: (rows(q) - columns(k)) % 1 == 0, "full"),
        (lambda q, k: (rows(q) - columns(k)) % 3 >= 1, "dense"),
        (lambda q, k: ((rows(q) - columns(k)) % 3 == 0) | (rows(q) == columns(k) + 1), "dense"),
        (lambda q, k: (2 * rows(q) - columns(k)) % 3 == 0, "dilated"),
        (lambda q, k: (rows(q) - 2 * columns(k)) % 3 == 0, "dense"),
        (lambda q, k: rows(q) % 3 == columns(k) % 3, "segments"),
        (lambda q, k: columns(k) % 3 == 0, "keys"),
        (lambda q, k: ((rows(q) - columns(k)) % 3 == 0) & ((rows(q) - columns(k)) % 2 == 0), "dense"),
        (lambda q, k: ((rows(q) - columns(k)) % 3 == 0) & (columns(k) % 7 > 0), "keys & dilated"),
        (lambda q, k: ((rows(q) - columns(k)) % 3 == 0) & (rows(q) // 8 == columns(k) // 8), "segments & dilated"),
    ],
)
def test_what_is_dilated_and_what_is_not(make: Make, text: str) -> None:
    module = trace_mask(make, q_len=20, kv_len=27)
    found = read_graph(module)
    assert (str(found.components), found.reason) == (text, None)
    assert found.components is not None
    assert_components_are_the_mask(module, found.components, torch.zeros(3, 2, 20, 4), torch.zeros(3, 2, 27, 4))


def test_a_finite_value_that_may_hide_a_row_is_not_read() -> None:
    def make(q: Tensor, k: Tensor) -> Tensor:
        return torch.where((rows(q) - columns(k)) % 3 == 0, 0.0, torch.finfo(torch.float32).min)

    assert read_mask(make).components is None


def test_numbers_of_queries_may_be_data() -> None:
    def make(q: Tensor, k: Tensor, position: Tensor) -> Tensor:
        return ((position[:, None, :, None] - columns(k)) % 4 == 0) & (rows(q) >= columns(k))

    position = torch.randint(0, 50, (3, 20), dtype=torch.int32)  # of int64, differences might overflow
    module = trace_mask(make, position)
    found = read_graph(module)
    assert str(found.components) == "causal & dilated"
    assert found.components is not None
    assert_components_are_the_mask(
        module, found.components, torch.zeros(3, 2, 20, 4), torch.zeros(3, 2, 20, 4), position
    )
