"""The operator that adds what lies side by side, with weights: `dash_inductor::band_sum`.

    band_sum(self, begins, weights, dim) -> Tensor

Along `dim` of `self`, a tensor of floating point, row r of the result is the sum of the elements from number
``begins[r]`` on, each multiplied by one of ``weights[:, r]``; an element of weight 0 has no part, infinite or not.  The
result has the dtype of the weights.  `begins` is of int32, [rows]; `weights` is [longest, rows], where `longest` is
known when a graph is compiled.

As one node of a graph it is one reader of `self`: Inductor computes in its kernel what it adds (`lowering.band_sums`),
and writes neither that nor the products.

Importing this module imports torch and defines the operator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .short_sums import MOST, short_sum

_lib = torch.library.Library("dash_inductor", "FRAGMENT")
_lib.define("band_sum(Tensor self, Tensor begins, Tensor weights, int dim) -> Tensor")

band_sum = torch.ops.dash_inductor.band_sum.default


def _fake(self: Tensor, begins: Tensor, weights: Tensor, dim: int) -> Tensor:
    return weights.new_empty([*self.shape[:dim], weights.shape[1], *self.shape[dim + 1 :]])


def _sum(self: Tensor, begins: Tensor, weights: Tensor, dim: int) -> Tensor:
    places = begins[:, None] + torch.arange(len(weights), device=self.device)
    found = self.to(weights.dtype).index_select(dim, places.reshape(-1)).unflatten(dim, places.shape)
    each = weights.t().reshape(*places.shape, *[1] * (self.dim() - 1 - dim))
    terms = torch.where(each != 0, each * found, 0)
    return short_sum(terms, dim + 1) if len(weights) <= MOST else terms.sum(dim + 1)


torch.library.register_fake("dash_inductor::band_sum", _fake, lib=_lib)
for _device in ("CPU", "CUDA"):
    _lib.impl("band_sum", _sum, _device)
