"""Masks that are read back as bands, however they are written."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor.model.mask import Band

from ..support.mask_graphs import read_as, read_mask

LOWEST = torch.finfo(torch.float32).min


def rows(q: Tensor) -> Tensor:
    return torch.arange(q.shape[2]).unsqueeze(1)


def columns(k: Tensor) -> Tensor:
    return torch.arange(k.shape[2]).unsqueeze(0)


def square(q: Tensor, k: Tensor, value: float = 1.0) -> Tensor:
    return torch.full((q.shape[2], k.shape[2]), value)


# Causal


def compare(q, k):
    return columns(k) <= rows(q)


def compare_strictly(q, k):
    return columns(k) < rows(q) + 1


def negated(q, k):
    return ~(columns(k) > rows(q))


def tril_of_ones(q, k):
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()


def tril_of_floats(q, k):
    return torch.tril(square(q, k)) != 0


def triu_of_infinity(q, k):
    return torch.triu(square(q, k, -math.inf), diagonal=1)


def triu_of_lowest(q, k):
    return torch.triu(square(q, k, LOWEST), 1)[None, None].expand(q.shape[0], 1, -1, -1)


def masked_fill_infinity(q, k):
    return torch.zeros(q.shape[2], k.shape[2]).masked_fill(compare(q, k).logical_not(), -math.inf)


def masked_fill_bfloat16(q, k):
    lowest = torch.finfo(torch.bfloat16).min
    return torch.zeros(q.shape[2], k.shape[2], dtype=torch.bfloat16).masked_fill(columns(k) > rows(q), lowest)


def where_of_scalars(q, k):
    return torch.where(compare(q, k), 0.0, -math.inf)


def inverted_times_lowest(q, k):
    return (1.0 - compare(q, k).to(torch.float32)) * LOWEST


def lowest_times_comparison(q, k):
    mask = square(q, k, LOWEST)
    return mask * (columns(k) > rows(q))


def sum_of_two_masks(q, k):
    return torch.triu(square(q, k, LOWEST), 1) + where_of_scalars(q, k)


def outer_subtraction(q, k):
    return (rows(q) - columns(k)) >= 0


def clamped_difference(q, k):
    return (rows(q) - columns(k)).clamp(min=-1, max=0) == 0


def maximum_of_masks(q, k):
    return torch.minimum(torch.zeros(()), torch.triu(square(q, k, -math.inf), 1))


def cumulative_positions(q, k):
    ones = torch.ones(q.shape[0], q.shape[2], dtype=torch.int64)
    position = ones.cumsum(-1) - 1
    return position[:, None, None, :] <= position[:, None, :, None]


def gathered_positions(q, k):
    position = torch.arange(q.shape[2]).expand(q.shape[0], -1)
    entry = torch.arange(q.shape[0])[:, None, None, None]
    return position[entry, rows(q)] >= position[entry, columns(k)]


def padded_to_16(q, k):
    """The memory-efficient kernel wants rows aligned to 16 elements: padded, then cut to the real length."""
    bias = torch.where(compare(q, k), 0.0, -math.inf)
    return F.pad(bias, (0, 16))[:, : k.shape[2]].expand(q.shape[0], q.shape[1], -1, -1)


def cut_from_a_longer_one(q, k):
    return torch.ones(64, 64, dtype=torch.bool).tril()[: q.shape[2], : k.shape[2]]


def transposed(q, k):
    return torch.ones(k.shape[2], q.shape[2], dtype=torch.bool).triu().transpose(0, 1)


def flattened_and_split(q, k):
    (batch, _, q_len, _), kv_len = q.shape, k.shape[2]
    return compare(q, k).expand(batch, -1, -1).reshape(batch * q_len, kv_len).reshape(batch, 1, q_len, kv_len)


def flipped(q, k):
    """Position n-1-i of a flipped ramp is n-1-(n-1-i)."""
    return columns(k).flip(1).flip(1) <= (q.shape[2] - 1 - rows(q)).flip(0)


def joined_from_halves(q, k):
    position = torch.cat([torch.arange(8), torch.arange(8, q.shape[2])])
    return position[None, :] <= position[:, None]


def written_in_place(q, k):
    mask = torch.zeros(q.shape[2], k.shape[2])
    mask[:, :] = torch.triu(square(q, k, -math.inf), 1)
    return mask


def filled_in_place(q, k):
    """As transformers 4 wrote it."""
    position = torch.arange(q.shape[2])
    mask = square(q, k, LOWEST)
    mask.masked_fill_(position < (position + 1).view(q.shape[2], 1), 0)
    return mask[None, None, :, :].expand(q.shape[0], 1, q.shape[2], k.shape[2])


CAUSAL = [
    compare,
    compare_strictly,
    negated,
    tril_of_ones,
    tril_of_floats,
    triu_of_infinity,
    triu_of_lowest,
    masked_fill_infinity,
    masked_fill_bfloat16,
    where_of_scalars,
    inverted_times_lowest,
    lowest_times_comparison,
    sum_of_two_masks,
    outer_subtraction,
    clamped_difference,
    maximum_of_masks,
    cumulative_positions,
    gathered_positions,
    padded_to_16,
    cut_from_a_longer_one,
    transposed,
    flattened_and_split,
    flipped,
    joined_from_halves,
    written_in_place,
    filled_in_place,
]


@pytest.mark.parametrize(
    ("dynamic", "decomposed"), [(False, True), (False, False), (True, True)], ids=["static", "static-plain", "dynamic"]
)
@pytest.mark.parametrize("make", CAUSAL, ids=lambda f: f.__name__)
def test_causal(make, dynamic, decomposed) -> None:
    assert read_mask(make, dynamic=dynamic, decomposed=decomposed) == read_as(Band(0, None))


# Other bands: (mask, band for static lengths of 20, band for dynamic lengths)


def window(q, k):
    return (columns(k) <= rows(q)) & (columns(k) > rows(q) - 5)


def window_as_union(q, k):
    distance = rows(q) - columns(k)
    return ((distance >= 0) & (distance < 3)) | ((distance >= 3) & (distance <= 4))


def window_additive(q, k):
    causal = torch.triu(square(q, k, LOWEST), 1)
    return causal + torch.tril(square(q, k, LOWEST), -5)


def window_filled_in_place(q, k):
    mask = filled_in_place(q, k)[0, 0].clone()
    mask.masked_fill_(torch.tril(torch.ones_like(mask, dtype=torch.bool), -5), LOWEST)
    return mask


def window_longer_than_all(q, k):
    return (columns(k) <= rows(q)) & (columns(k) > rows(q) - 4096)


def symmetric(q, k):
    return (rows(q) - columns(k)).abs() <= 3


def two_sided(q, k):
    return ~((columns(k) > rows(q) + 2) | (rows(q) - columns(k) >= 7))


def anticausal(q, k):
    return columns(k) >= rows(q)


def everything(q, k):
    return torch.ones(q.shape[0], 1, q.shape[2], k.shape[2], dtype=torch.bool)


def everything_additive(q, k):
    return torch.zeros(1, 1, 1, k.shape[2])


def everything_by_arithmetic(q, k):
    return rows(q) + columns(k) >= 0


def strided_positions(q, k):
    """Every second position of a ramp twice as long: 2 i >= 2 j."""
    return torch.arange(0, 2 * q.shape[2])[::2].unsqueeze(1) >= 2 * columns(k)


def position_in_blocks(q, k):
    """The positions of the queries of a rank, as context parallel has them for FlexAttention."""
    return columns(k) <= (2 + rows(q) // 8) * 8 + rows(q) % 8


BANDS = [
    (window, Band(0, 4), Band(0, 4)),
    (window_as_union, Band(0, 4), Band(0, 4)),
    (window_additive, Band(0, 4), Band(0, 4)),
    (window_filled_in_place, Band(0, 4), Band(0, 4)),
    (window_longer_than_all, Band(0, None), Band(0, 4095)),
    (symmetric, Band(-3, 3), Band(-3, 3)),
    (two_sided, Band(-2, 6), Band(-2, 6)),
    (anticausal, Band(None, 0), Band(None, 0)),
    (everything, Band(), Band()),
    (everything_additive, Band(), Band()),
    (everything_by_arithmetic, Band(), Band()),
    (strided_positions, Band(0, None), Band(0, None)),
    (position_in_blocks, Band(-16, None), Band(-16, None)),
]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("make", "static_band", "dynamic_band"), BANDS, ids=lambda x: getattr(x, "__name__", ""))
def test_band(make, static_band, dynamic_band, dynamic) -> None:
    assert read_mask(make, dynamic=dynamic) == read_as(dynamic_band if dynamic else static_band)


# Different lengths


def bottom_right(q, k):
    return columns(k) <= rows(q) + (k.shape[2] - q.shape[2])


def bottom_right_tril(q, k):
    return square(q, k).tril(k.shape[2] - q.shape[2]).bool()


def bottom_right_last_rows(q, k):
    """The last rows of the square causal mask of all keys."""
    return torch.ones(k.shape[2], k.shape[2], dtype=torch.bool).tril()[k.shape[2] - q.shape[2] :]


def bottom_right_window(q, k):
    position = rows(q) + (k.shape[2] - q.shape[2])
    return (columns(k) <= position) & (position - columns(k) < 5)


@pytest.mark.parametrize(
    ("make", "lo", "hi"),
    [
        (bottom_right, 0, None),
        (bottom_right_tril, 0, None),
        (bottom_right_last_rows, 0, None),
        (bottom_right_window, 0, 4),
    ],
)
def test_bottom_right(make, lo, hi) -> None:
    assert read_mask(make, q_len=12, kv_len=20) == read_as(Band(lo - 8, None if hi is None else hi - 8))
    assert read_mask(make, q_len=12, kv_len=20, dynamic=True) == read_as(Band(lo, hi, "bottom_right"))


@pytest.mark.parametrize(("q_len", "kv_len"), [(12, 20), (20, 12)])
@pytest.mark.parametrize("make", [compare, tril_of_ones, where_of_scalars])
def test_top_left_with_different_lengths(make, q_len, kv_len) -> None:
    for dynamic in (False, True):
        assert read_mask(make, q_len=q_len, kv_len=kv_len, dynamic=dynamic) == read_as(Band(0, None))


def test_one_query_sees_all_keys() -> None:
    assert read_mask(bottom_right, q_len=1) == read_as(Band())
    assert read_mask(compare, q_len=1) == read_as(Band(0, None))
    assert read_mask(compare, kv_len=1) == read_as(Band())


def test_long_masks_are_checked_in_parts() -> None:
    for make, band in ((window, Band(0, 4)), (where_of_scalars, Band(0, None)), (padded_to_16, Band(0, None))):
        assert read_mask(make, q_len=32768, kv_len=32768) == read_as(band)
        assert read_mask(make, q_len=30000, kv_len=30000, dynamic=True) == read_as(band)


# The chain that transformers builds, with its packed-sequence component


def packed_sequence_chain(q, k, *, window: int | None = None, offset: int = 0):
    batch, length = q.shape[0], q.shape[2]
    position = (torch.arange(length) + offset).unsqueeze(0).expand(batch, -1)
    difference = torch.diff(position, prepend=position[:, :1] - 1, dim=-1)
    packed = (difference != 1).cumsum(-1)
    entry = torch.arange(batch)[:, None, None, None]
    q_index, kv_index = torch.arange(length)[None, None, :, None], torch.arange(length)[None, None, None, :]
    mask = q_index.new_ones((), dtype=torch.bool) & (packed[entry, q_index] == packed[entry, kv_index])
    if window is not None:
        mask = mask & (position[entry, kv_index] > position[entry, q_index] - window)
    mask = mask & (position[entry, kv_index] <= position[entry, q_index])
    return torch.where(mask.expand(batch, -1, length, length), 0.0, -math.inf)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("window", "band"), [(None, Band(0, None)), (6, Band(0, 5))])
@pytest.mark.parametrize("offset", [0, 100])
def test_packed_sequence_component_is_proved_constant(window, band, offset, dynamic) -> None:
    found = read_mask(lambda q, k: packed_sequence_chain(q, k, window=window, offset=offset), dynamic=dynamic)
    assert found == read_as(band)
