"""Defines `dash_inductor::band_sum`: products with banded matrices along one or several dimensions.

    band_sum(self, begins, weights, dim) -> Tensor

    self: floating point, any shape.
    begins: for each summed dimension an int32 tensor [rows]: the first element of each row's band.
    weights: for each summed dimension a tensor [longest, rows]; `longest` is known at compile time.
    dim: the first of the summed dimensions; the others follow it.

Along each summed dimension, element r of the result is the sum of ``weights[i, r] * self[begins[r] + i]`` over i.
Elements with weight 0 do not contribute, even if they are infinite or NaN.  The last dimension is summed first.  The
result has the dtype of the weights.  The product of all `longest` is at most `MOST`.

In the graph, the operator is a single reader of `self`, so that Inductor computes `self` inside its kernel
(`lowering.banded_matmul`) and writes neither `self` nor the products to memory.

Importing this module imports torch and defines the operator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .unrolled_reductions import MOST, short_sum

_lib = torch.library.Library("dash_inductor", "FRAGMENT")
_lib.define("band_sum(Tensor self, Tensor[] begins, Tensor[] weights, int dim) -> Tensor")

band_sum = torch.ops.dash_inductor.band_sum.default


def _fake(self: Tensor, begins: list[Tensor], weights: list[Tensor], dim: int) -> Tensor:
    rows = [of.shape[1] for of in weights]
    return weights[0].new_empty([*self.shape[:dim], *rows, *self.shape[dim + len(rows) :]])


def _sum(self: Tensor, begins: list[Tensor], weights: list[Tensor], dim: int) -> Tensor:
    total = self.to(weights[0].dtype)
    for axis in reversed(range(dim, dim + len(begins))):
        begin, of = begins[axis - dim], weights[axis - dim]
        places = begin[:, None] + torch.arange(len(of), device=self.device)
        found = total.index_select(axis, places.reshape(-1)).unflatten(axis, places.shape)
        each = of.t().reshape(*places.shape, *[1] * (total.dim() - 1 - axis))
        terms = torch.where(each != 0, each * found, 0)
        total = short_sum(terms, axis + 1) if len(of) <= MOST else terms.sum(axis + 1)
    return total


torch.library.register_fake("dash_inductor::band_sum", _fake, lib=_lib)
for _device in ("CPU", "CUDA"):
    _lib.impl("band_sum", _sum, _device)
