"""Replaces the backward of `grid_sample`, which has no deterministic kernel on CUDA in PyTorch.

It is replaced by the backward that autograd derives from a forward in other operators.  That adds gradients to the
pixels around each position with `index_put`, which the pass `index_sums` then rewrites.  To need only one sort, all
channels of a pixel are added together, and all pixels around a position share one index, that of the first of them.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from ...config import Config
from ...graph import sizes
from ...graph.emit import Emitter
from ...graph.nodes import bind
from ...records.records import Record
from ..base.rewrite import Result
from . import replaced_operators
from .index_sums import is_ours

OPERATORS = (torch.ops.aten.grid_sampler_2d_backward.default, torch.ops.aten.grid_sampler_3d_backward.default)

LINEAR, NEAREST, CUBIC = range(3)
"""The interpolation modes, with the numbers of PyTorch's operators."""
ZEROS, BORDER, REFLECTION = range(3)
"""The padding modes, with the numbers of PyTorch's operators."""


@dataclass(frozen=True)
class GridSampleRewrite:
    """The pass that replaces the backward of `grid_sample`, in 2-D and 3-D, by deterministic operators on CUDA."""

    name: ClassVar[str] = "grid_sample"

    def is_on(self, config: Config) -> bool:
        return self.name in config.rewrites

    def apply(self, graph: Graph) -> Sequence[Result]:
        found = [node for target in OPERATORS for node in graph.find_nodes(op="call_function", target=target)]
        return [
            Result(_rewritten(node))
            for node in found
            if node.users
            and not replaced_operators.has_failed(GridSampleRewrite.name, node)
            and is_ours(bind(node)["grad_output"].meta["val"].device)
        ]

    def leave(self, graph: Graph, cause: str) -> Sequence[Result]:
        """Returns no fallback records: without this pass, PyTorch's operator runs.

        Under deterministic algorithms, that operator raises an error by itself.
        """
        return []


@dataclass(frozen=True)
class _Tap:
    """A weighted element that positions read along one dimension of the zero-padded image.

    Attributes:
        cell: the index of the element, without `shift`.  The taps of a dimension share this tensor if possible, so that
            all their gradients are sums by one index, which is sorted once.
        shift: an offset that is added to the index.
        border: the number of zero elements before and after the image, the same for all taps of a dimension.
        weight: the weight of the element, finite.
        reads: whether any tap of the dimension reads an element, the same tensor for all of them.
    """

    cell: Tensor
    shift: int
    border: int
    weight: Tensor
    reads: Tensor


def sampled(image: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool) -> Tensor:
    """Computes `grid_sample` in operators whose backward is deterministic; the result is [n, channels, shape...].

    Args:
        image: [n, channels, sizes...].
        grid: positions, [n, shape..., dimensions], from -1 to 1 inside the image; the first coordinate is that along
            the image's last dimension.
        interpolation_mode: `LINEAR`, `NEAREST` or `CUBIC`.
        padding_mode: `ZEROS`, `BORDER` or `REFLECTION`.
        align_corners: as in PyTorch's `grid_sample`.
    """
    exact = torch.float64 if image.dtype == torch.float64 else torch.float32
    lengths = list(image.shape[2:])
    axes = []
    for dim, length in enumerate(lengths):
        at = grid[..., len(lengths) - 1 - dim].to(exact)
        at = (at + 1) / 2 * (length - 1) if align_corners else ((at + 1) * length - 1) / 2
        axes.append(_taps(at, length, interpolation_mode, padding_mode, align_corners))
    borders = [axis[0].border for axis in axes]
    pixels = image.to(exact).movedim(1, -1)
    pixels = F.pad(pixels, [0, 0, *(border for border in reversed(borders) for _ in range(2))])
    number = torch.arange(image.shape[0], device=image.device).reshape(-1, *[1] * len(lengths))
    cells = [length + border for length, border in zip(lengths, borders, strict=True)]
    reads = functools.reduce(torch.logical_and, (axis[0].reads for axis in axes))
    total = None
    for taps in itertools.product(*axes):
        part = pixels
        for dim, (tap, count) in enumerate(zip(taps, cells, strict=True)):
            part = part.narrow(1 + dim, tap.shift, count)
        weight = torch.where(reads, functools.reduce(torch.mul, (tap.weight for tap in taps)), 0)
        places = number, *(tap.cell for tap in taps)
        term = torch.where(reads[..., None], part[places] * weight[..., None], 0)
        total = term if total is None else total + term
    assert total is not None
    return total.movedim(-1, 1).to(image.dtype)


def _taps(at: Tensor, length: int, interpolation: int, padding: int, corners: bool) -> list[_Tap]:
    """The taps of positions along one dimension."""
    if padding != ZEROS and interpolation == CUBIC:
        first = at.floor()
        neighbours = [_padded(first + i, length, padding, corners).detach().long() for i in range(-1, 3)]
        weights, reads = _cubic(at - first), torch.ones_like(at, dtype=torch.bool)
        return [_Tap(cell, 0, 0, weight, reads) for cell, weight in zip(neighbours, weights, strict=True)]
    if padding != ZEROS:
        at = _padded(at, length, padding, corners)
    near = (at > -3) & (at < length + 2)  # neither far outside nor NaN
    at = torch.where(near, at, -3)
    first = at.detach().round() if interpolation == NEAREST else at.detach().floor()
    part = at - first
    weights = {LINEAR: [1 - part, part], NEAREST: [torch.ones_like(part)], CUBIC: _cubic(part)}[interpolation]
    border = len(weights) - 1
    cell = first + (border - 1 if interpolation == CUBIC else border)
    reads = (cell >= 0) & (cell < length + border)
    cell = torch.where(reads, cell, 0).long()
    return [_Tap(cell, i, border, weight, reads) for i, weight in enumerate(weights)]


def _padded(at: Tensor, length: int, padding: int, corners: bool) -> Tensor:
    """Maps positions into the image, by clamping or reflection."""
    if padding == REFLECTION:
        low, span = (0.0, float(length - 1)) if corners else (-0.5, float(length))
        if span == 0:
            return torch.zeros_like(at)
        away = (at - low).abs()
        turns = (away.detach() / span).floor()
        extra = away - turns * span
        at = torch.where(turns % 2 == 0, extra + low, span - extra + low)
    inside = (at > 0) & (at < length - 1)  # a position on the border has no gradient, as in PyTorch's kernels
    return torch.where(inside, at, at.detach().nan_to_num(0.0).clamp(0, length - 1))


def _cubic(part: Tensor) -> list[Tensor]:
    """The bicubic weights of four neighbours; the position is `part` after the second one."""
    a = -0.75

    def near(x: Tensor) -> Tensor:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Tensor) -> Tensor:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(part + 1), near(part), near(1 - part), far(2 - part)]


def gradient(args: Mapping[str, Any], which: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Returns a function (grad_output, image, grid) -> one gradient of `grid_sample`.

    Args:
        args: the arguments of the backward operator by name, of which the modes are used.
        which: 0 for the gradient of the image, 1 for that of the grid.
    """

    def function(grad_output: Tensor, image: Tensor, grid: Tensor) -> Tensor:
        leaves = image.detach().requires_grad_(), grid.detach().requires_grad_()
        with torch.enable_grad():
            out = sampled(*leaves, args["interpolation_mode"], args["padding_mode"], args["align_corners"])
        (found,) = torch.autograd.grad(out, leaves[which], grad_output, allow_unused=True)
        return torch.zeros_like(leaves[which]) if found is None else found  # nearest: does not depend on the grid

    return function


def _rewritten(node: Node) -> Record:
    """Rewrites one backward; returns its record."""
    args = bind(node)
    tensors = args["grad_output"], args["input"], args["grid"]
    facts = {name: [sizes.static(n) for n in args[name].meta["val"].shape] for name in ("input", "grid")}
    results = [user for user in node.users if user.target is operator.getitem]

    def make(emitter: Emitter) -> dict[Node, Node]:
        made = {}
        for result in results:
            which: Any = result.args[1]
            function = gradient(args, which)
            new = emitter.inline(function, tensors, before=result, like=result, with_autograd=True)
            made[result] = emitter.laid_out(new, like=result)
        return made

    detail = "sums by index of what each position adds to the elements around it"
    return replaced_operators.replaced(GridSampleRewrite.name, node, facts, detail, make)
