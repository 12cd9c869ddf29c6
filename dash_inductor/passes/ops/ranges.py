"""Banded matmuls: each row of the result adds a range of positions, with a weight for each of them.

In each dimension a banded matrix [rows, positions] holds the weight of each position in each row.  The begin of a row's
range is a function of the row's number, and the weights in the ranges are a table on the device.  Sums in several
dimensions are products of their matrices, so that one dimension is summed after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from .operators.banded_matmul import band_sum
from .operators.unrolled_reductions import MOST as UNROLLED

MOST = 256
"""Positions of a row at most, in one dimension."""
COMPARED = 1 << 26
"""Triples of a row, a position and a place in the row's range that are compared at most, to make a table."""


@dataclass(frozen=True)
class Band:
    """The sums of one dimension.

    Attributes:
        rows, positions: how many there are.
        longest: positions from the first to the last one that a row adds, at most.
        line: three numbers a, b and c; the range of row r begins at (a * r + b) // c, or within bounds next to that.
        matrix: given tensors of the graph, of which the first has the device, and the dtype of weights, the weights:
            [rows, positions].
    """

    rows: int
    positions: int
    longest: int
    line: tuple[int, int, int]
    matrix: Callable[..., Tensor]

    @property
    def fits(self) -> bool:
        return self.longest <= MOST and self.longest * self.rows * self.positions <= COMPARED

    def begins(self, device: torch.device) -> Tensor:
        """int32 [rows]: the first position of each row's range, of which the last one is a position, too."""
        slope, offset, divisor = self.line
        most = self.positions - self.longest
        rows = torch.arange(self.rows, device=device, dtype=torch.int64 if divisor > 1 else torch.int32)
        reached = rows * slope + offset
        if divisor == 1:
            return reached.clamp(0, most)
        numbers = torch.arange(1, most + 1, device=device) * divisor
        return (numbers <= reached[:, None]).sum(1).to(torch.int32)  # which divides nothing

    def weights(self, *tensors: Tensor, dtype: torch.dtype) -> Tensor:
        """[longest, rows]: the weights of each row's range."""
        device = tensors[0].device
        places = torch.arange(self.longest, device=device)[:, None, None] + self.begins(device)[None, :, None]
        here = torch.arange(self.positions, device=device) == places
        return torch.where(here, self.matrix(*tensors, dtype=dtype), 0).sum(-1)


def band(first: Tensor, last: Tensor, rows: int, matrix: Callable[..., Tensor]) -> Band:
    """The band of a matrix.

    Args:
        first, last: integers on the CPU, [positions]: the least and the largest row that each position may reach.
    """
    positions = first.numel()
    numbers = torch.arange(rows, device="cpu")
    begins = torch.searchsorted(last.cummax(0).values, numbers)
    ends = torch.searchsorted(first.flip(0).cummin(0).values.flip(0), numbers, right=True)
    filled = ends > begins
    numbers, begins, ends = numbers[filled], begins[filled], ends[filled]
    if not numbers.numel():
        return Band(rows, positions, 1, (0, 0, 1), matrix)
    slopes = {Fraction(positions, rows), *([Fraction(positions - 1, rows - 1)] if rows > 1 else [])}
    found = []
    for slope in sorted(slopes):
        a, c = slope.numerator, slope.denominator
        b = int((begins * c + c - 1 - numbers * a).min())
        longest = int((ends - ((numbers * a + b) // c).clamp(min=0)).max())
        found.append((longest, c, a, b))
    longest, c, a, b = min(found)
    return Band(rows, positions, longest, (a, b, c), matrix)


def weighted(values: Tensor, *tables: Tensor, batch: int, dtype: torch.dtype | None = None) -> Tensor:
    """The sums, in fp32 or in fp64 for fp64, rounded to a dtype.

    Args:
        values: [batch..., positions of each dimension, columns...].
        tables: of each dimension that is summed, where ranges begin, and their weights.
        batch: leading dimensions in front of those that are summed.
        dtype: of the result, that of the values without it.
    """
    begins, weights, total = tables[::2], tables[1::2], values
    if math.prod(map(len, weights)) <= UNROLLED:
        total = band_sum(values, begins, weights, batch)
    else:
        for axis in sorted(range(len(weights)), key=lambda axis: weights[axis].shape[1] / values.shape[batch + axis]):
            total = band_sum(total, [begins[axis]], [weights[axis]], batch + axis)
    return total.to(dtype or values.dtype)


def windows(size: int, count: int) -> Band:
    """The backward of adaptive average pooling: number i of its windows is [i * size // count, ...), and an element
    gets what is left of each window that it lies in, divided by the window's length.
    """

    def bounds(device: torch.device | str) -> tuple[Tensor, Tensor]:
        positions = torch.arange(count, device=device)
        return positions * size // count, ((positions + 1) * size + count - 1) // count

    def matrix(like: Tensor, dtype: torch.dtype) -> Tensor:
        begins, ends = bounds(like.device)
        elements = torch.arange(size, device=like.device)[:, None]
        return torch.where((elements >= begins) & (elements < ends), 1 / (ends - begins).to(dtype), 0)

    begins, ends = bounds("cpu")
    return band(begins, ends - 1, size, matrix)


@dataclass(frozen=True)
class Filter:
    """How interpolation with antialiasing weighs its neighbours.

    Attributes:
        width: of its support, in elements where nothing is made smaller.
        weight: of the distance to a neighbour.
    """

    width: int
    weight: Callable[[Tensor], Tensor]


def _triangle(x: Tensor) -> Tensor:
    return (1 - x.abs()).clamp(min=0)


def _cubic(x: Tensor) -> Tensor:
    x, a = x.abs(), -0.5
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * a
    return torch.where(x < 1, near, torch.where(x < 2, far, 0))


def _lanczos(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 3, torch.special.sinc(x) * torch.special.sinc(x / 3), 0)


TRIANGLE, CUBIC, LANCZOS = Filter(2, _triangle), Filter(4, _cubic), Filter(6, _lanczos)


def antialiased(rows: int, positions: int, scale: float, kind: Filter) -> Band:
    """The backward of interpolation with antialiasing: a position has been made of the rows that its filter covers.

    Args:
        scale: rows per position.
    """
    support, inverse = kind.width / 2 * max(scale, 1.0), 1 / max(scale, 1.0)

    def bounds(device: torch.device | str, dtype: torch.dtype, margin: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
        """The middle of each position, its first row, and the first one behind its last."""
        middle = (torch.arange(positions, device=device).to(dtype) + 0.5) * scale
        begins, ends = middle - support + 0.5 - margin, middle + support + 0.5 + margin
        return middle, begins.clamp(min=0).floor(), ends.clamp(max=rows).floor()

    def matrix(like: Tensor, dtype: torch.dtype) -> Tensor:
        middle, begins, ends = bounds(like.device, dtype)
        row = torch.arange(rows, device=like.device).to(dtype)[:, None]
        weights = torch.where((row >= begins) & (row < ends), kind.weight((row - middle + 0.5) * inverse), 0)
        return weights / weights.sum(0)

    _, begins, ends = bounds("cpu", torch.float64, 1e-5 * (1 + rows))
    return band(begins.long(), ends.long() - 1, rows, matrix)
