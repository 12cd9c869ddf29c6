"""Multiplies by banded matrices: each row of the result is a weighted sum over a range of positions of the operand.

In each dimension, a banded matrix [rows, positions] holds the weight of each position in each row.  The start of a
row's range is a function of the row number; the weights in the ranges are a table on the device.  A sum over several
dimensions has a product of these matrices, so they are summed one after another.
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
"""The maximum length of a row's range in one dimension."""
COMPARED = 1 << 26
"""The maximum number of (row, position, place in the range) triples that are compared to make a table."""


@dataclass(frozen=True)
class Band:
    """A banded matrix [rows, positions], which is applied along one dimension of a tensor.

    Attributes:
        rows, positions: the sizes of the matrix: rows of the result, and positions in the operand.
        longest: the maximum length of a row's range.
        line: numbers (a, b, c): the range of row r begins at (a * r + b) // c, clamped to valid positions.
        matrix: a function that returns the whole matrix; its arguments are the tensors of the graph from which the
            weights are computed (the result is on the device of the first), and ``dtype``, that of the weights.
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
        """Computes the position at which each row's range of weights begins, int32 [rows].

        Positions are clamped so that `longest` positions exist from there on.
        """
        slope, offset, divisor = self.line
        most = self.positions - self.longest
        rows = torch.arange(self.rows, device=device, dtype=torch.int64 if divisor > 1 else torch.int32)
        reached = rows * slope + offset
        if divisor == 1:
            return reached.clamp(0, most)
        numbers = torch.arange(1, most + 1, device=device) * divisor
        return (numbers <= reached[:, None]).sum(1).to(torch.int32)  # avoids a division

    def weights(self, *tensors: Tensor, dtype: torch.dtype) -> Tensor:
        """Computes the weights inside the rows' ranges, [longest, rows]: that of each position of each row's range.

        Args:
            tensors: the tensors from which `matrix` computes the weights.
            dtype: the dtype of the weights.
        """
        device = tensors[0].device
        places = torch.arange(self.longest, device=device)[:, None, None] + self.begins(device)[None, :, None]
        here = torch.arange(self.positions, device=device) == places
        return torch.where(here, self.matrix(*tensors, dtype=dtype), 0).sum(-1)


def band(first: Tensor, last: Tensor, rows: int, matrix: Callable[..., Tensor]) -> Band:
    """Returns the `Band` that describes a matrix whose rows are zero outside of a range of positions.

    Of two slopes for the line along which ranges begin, the one with the shorter ranges is chosen.

    Args:
        first, last: integers on the CPU, [positions]: the smallest and the largest row that each position may
            contribute to.
        rows: the number of rows.
        matrix: computes the matrix, see `Band.matrix`.
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
    """Multiplies by banded matrices along one or several dimensions, in fp32 (fp64 for fp64 values).

    Args:
        values: [batch..., positions of each dimension, columns...].
        tables: for each summed dimension, two tensors: `Band.begins` and `Band.weights`.
        batch: the number of leading dimensions before those that are summed.
        dtype: the dtype of the result, by default that of the values.
    """
    begins, weights, total = tables[::2], tables[1::2], values
    if math.prod(map(len, weights)) <= UNROLLED:
        total = band_sum(values, begins, weights, batch)
    else:
        for axis in sorted(range(len(weights)), key=lambda axis: weights[axis].shape[1] / values.shape[batch + axis]):
            total = band_sum(total, [begins[axis]], [weights[axis]], batch + axis)
    return total.to(dtype or values.dtype)


def windows(size: int, count: int) -> Band:
    """Returns the `Band` for the backward of adaptive average pooling, which pools `size` elements to `count` windows.

    Window i begins at i * size // count.  An element gets the gradient of each window that contains it, divided by the
    window's length.
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
    """The filter of antialiased interpolation, for example a triangle.

    Attributes:
        width: the width of its support, in input elements, when upsampling; it grows with the scale when downsampling.
        weight: a function from distances, divided by the scale when downsampling, to weights (tensors).
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
    """Returns the `Band` for the backward of antialiased interpolation, from output elements to input elements.

    Each output element was computed from the input elements under its filter.

    Args:
        rows: the number of input elements of the forward.
        positions: the number of its output elements.
        scale: the input elements per output element.
        kind: the filter.
    """
    support, inverse = kind.width / 2 * max(scale, 1.0), 1 / max(scale, 1.0)

    def bounds(device: torch.device | str, dtype: torch.dtype, margin: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
        """The centre of the filter of each output element, and the range of input elements (rows) under it."""
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
