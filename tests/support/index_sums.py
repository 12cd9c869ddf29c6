"""Programs that add rows by an index, forward or backward, and what their gradients are in double precision."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Program = Callable[[Tensor, Tensor], Tensor]
"""A function of a tensor with a gradient, and of an index."""


def _repeated(x: Tensor, index: Tensor) -> Tensor:
    """Values for an index, from the rows of x."""
    rows = torch.arange(index.numel(), device=x.device) % x.shape[0]
    return x.index_select(0, rows)


def _add(x: Tensor, index: Tensor) -> Tensor:
    return x.cos().index_add(0, index, _repeated(x, index))


def _scatter(x: Tensor, index: Tensor) -> Tensor:
    return torch.zeros_like(x).scatter_add(0, index[:, None].expand(-1, x.shape[1]), _repeated(x, index))


def _mean(x: Tensor, index: Tensor) -> Tensor:
    wide = index[:, None].expand(-1, x.shape[1])
    return torch.zeros_like(x).scatter_reduce(0, wide, _repeated(x, index), "mean", include_self=False)


def _elements(x: Tensor, index: Tensor) -> Tensor:
    """An index that is another one in each column."""
    place = (index[:, None] + torch.arange(x.shape[1], device=x.device)) % x.shape[0]
    return torch.zeros_like(x).scatter_add(0, place, _repeated(x, index))


def _layers(x: Tensor, index: Tensor) -> Tensor:
    """Two layers of a graph network, whose sums read one index."""
    other = index.flip(0)
    for _ in range(2):
        x = torch.zeros_like(x).index_add(0, index, x[other] / 64)
    return x


def _edges(x: Tensor, index: Tensor) -> Tensor:
    """Sums of rows that are named, counted from the end: nobody writes them for each of their names."""
    return torch.zeros_like(x).index_add(0, index, x[index.flip(0) - x.shape[0]])


PROGRAMS: dict[str, Program] = {
    "rows": lambda x, index: x[index],
    "negative": lambda x, index: x[index - x.shape[0]],
    "narrow": lambda x, index: x.index_select(0, index.int()),
    "columns": lambda x, index: x[:, index % x.shape[1]],
    "two": lambda x, index: x.reshape(-1, 2, x.shape[1])[index // 2, index % 2],
    "gather": lambda x, index: x.gather(0, index[:, None].expand(-1, x.shape[1])),
    "batches": lambda x, index: x.reshape(2, -1, x.shape[1]).gather(
        1, (index[: index.numel() // 2 * 2].reshape(2, -1, 1) % (x.shape[0] // 2)).expand(-1, -1, x.shape[1])
    ),
    "transposed": lambda x, index: x.t()[:, index],
    "embedding": lambda x, index: F.embedding(index, x),
    "index_add": _add,
    "scatter_add": _scatter,
    "scatter_mean": _mean,
    "elements": _elements,
    "layers": _layers,
    "edges": _edges,
}


def results(function: Program, x: Tensor, index: Tensor) -> list[Tensor]:
    """The result of a program, and the gradient of x for one of the result that is positive, so that sums are no
    differences.
    """
    leaf = x.detach().requires_grad_()
    out = function(leaf, index)
    grad_out = (
        torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64, device=x.device).reshape(out.shape).to(out.dtype)
    )
    (gradient,) = torch.autograd.grad(out, leaf, grad_out)
    return [out.detach(), gradient]


def worst(found: list[Tensor], exact: list[Tensor]) -> float:
    """The largest error of a result or of a gradient, relative to its norm."""
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "max_pool3d": lambda x: F.max_pool3d(x, 3, 2),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x.flatten(1, 2), (4, 3)),
    "adaptive_max_pool3d": lambda x: F.adaptive_max_pool3d(x, (4, 3, 5)),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(
        x.flatten(1, 2),
        3,
        output_size=(4, 3),
        _random_samples=x.detach().flatten(2)[:, :, :2].sigmoid().repeat(1, 8, 1),
    ),
}
"""Poolings of [batch, channels, 8, 7, 9] whose backward has no deterministic kernel on CUDA."""
