"""Lowers `put_distinct`, a scatter by distinct indices, to a kernel that can also compute the values that it writes.

Under deterministic algorithms Inductor calls ATen for scatters by index tensors, which sorts the indices.  Its lowering
of `scatter_reduce_` without a reduction does not check for deterministic algorithms, and generates a plain store.
"""

from __future__ import annotations

from typing import Any

import torch

from ....upstream.inductor import TensorBox, empty_strided, lowerings, register_lowering
from ..operators.distinct import put_distinct

aten = torch.ops.aten


def register() -> None:
    """Registers this module's lowering of `dash_inductor::put_distinct` with Inductor."""
    register_lowering(put_distinct, type_promotion_kind=None)(_put)


def _put(indices: TensorBox, values: TensorBox, size: Any, dim: int, rest: float | None) -> TensorBox:
    """Lowers the operator; see `operators.distinct` for the arguments."""
    shape = [*values.get_size()]
    shape[dim] = size
    dtype, device = values.get_dtype(), values.get_device()
    if rest is None:
        found = empty_strided(shape, None, dtype=dtype, device=device)
    else:
        found = lowerings[aten.full](shape, rest, dtype=dtype, device=device)
    stored: TensorBox = lowerings[aten.scatter_reduce_](found, dim, indices, values, None)
    return stored
