"""Defines `dash_inductor::put_distinct`: a scatter by indices that are known to be distinct.

    put_distinct(indices, values, size, dim, rest) -> Tensor

    indices, values: tensors of the same shape.
    size: the size of the result along `dim`; its other sizes are those of `values`.
    rest: the value of all elements without an index; None if every element has one.

Along `dim`, element ``indices[i]`` of the result is ``values[i]``.  The caller has proved that the indices in each 1-D
slice along `dim` are distinct and from 0 to size - 1, and, if `rest` is None, that they cover every element.  So the
order of writes does not matter, and Inductor generates a scatter without a sort (`lowering.distinct`).

Importing this module imports torch and defines the operator.
"""

from __future__ import annotations

import torch
from torch import Tensor

_lib = torch.library.Library("dash_inductor", "FRAGMENT")
_lib.define("put_distinct(Tensor indices, Tensor values, SymInt size, int dim, Scalar? rest) -> Tensor")

put_distinct = torch.ops.dash_inductor.put_distinct.default


def _fake(indices: Tensor, values: Tensor, size: int, dim: int, rest: float | None) -> Tensor:
    shape = list(values.shape)
    shape[dim] = size
    return values.new_empty(shape)


def _put(indices: Tensor, values: Tensor, size: int, dim: int, rest: float | None) -> Tensor:
    found = _fake(indices, values, size, dim, rest)
    if rest is not None:
        found.fill_(rest)
    return found.scatter_(dim, indices.to(torch.int64), values)


torch.library.register_fake("dash_inductor::put_distinct", _fake, lib=_lib)
for _device in ("CPU", "CUDA"):
    _lib.impl("put_distinct", _put, _device)
