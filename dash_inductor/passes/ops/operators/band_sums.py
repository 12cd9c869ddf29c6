"""The operator that adds what lies side by side, with weights: `dash_inductor::band_sum`.

    band_sum(self, begins, weights, dim) -> Tensor

Sums along one or several dimensions of `self`, a tensor of floating point, from `dim` on.  Along each, row r of the
result is the sum of the elements from number ``begins[r]`` on, each multiplied by one of ``weights[:, r]``; an element
of weight 0 has no part, infinite or not.  The result has the dtype of the weights.  For each dimension, `begins` has an
int32 tensor, [rows], and `weights` one [longest, rows], where `longest` is known when a graph is compiled.  Of several
dimensions the last one is summed first; all of them together may have `MOST` terms.

As one node of a graph it is one reader of `self`: Inductor computes in its kernel what it adds (`lowering.band_sums`),
and writes neither that nor the products.

Importing this module imports torch and defines the operator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .short_sums import MOST, short_sum

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
