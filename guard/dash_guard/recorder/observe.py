"""The operator that passes tensors of a compiled graph to the observers of a training run.

    dash_guard::observe(Tensor[] tensors, str[] names, Tensor(a!) scratch) -> ()

It reads `tensors`, whose `names` are for people, and changes none of them. It declares that it mutates `scratch`, int64
[2], because an operator without a result would be removed. Without an observer (`receive`) it does nothing.

Importing this module defines the operator.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_lib = torch.library.Library("dash_guard", "DEF")
_lib.define(
    "observe(Tensor[] tensors, str[] names, Tensor(a!) scratch) -> ()",
    tags=(torch.Tag.flexible_layout,),
)
observe = torch.ops.dash_guard.observe.default

receive: Callable[[list[Tensor], list[str], Tensor], None] | None = None
"""Is called with the operator's arguments, on the calling thread; `recorder.in_graphs` sets it."""


def _observe(tensors: list[Tensor], names: list[str], scratch: Tensor) -> None:
    if receive is not None:
        receive(tensors, names, scratch)


torch.library.register_fake("dash_guard::observe", lambda tensors, names, scratch: None, lib=_lib)
for _device in ("CPU", "CUDA"):
    _lib.impl("observe", _observe, _device)
