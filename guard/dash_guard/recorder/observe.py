"""The operator that shows tensors of a compiled graph to whoever watches the training run.

    dash_guard::observe(Tensor[] tensors, str[] names, Tensor(a!) scratch) -> ()

It reads `tensors`, whose `names` are for people, and changes none of them.  It says that it mutates `scratch`, int64
[2], because nobody would run an operator without a result.  Nothing happens while nobody watches (`receive`).

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
"""Gets the operator's arguments at every call, on the thread that calls it; `recorder.in_graphs` sets it."""


def _observe(tensors: list[Tensor], names: list[str], scratch: Tensor) -> None:
    if receive is not None:
        receive(tensors, names, scratch)


torch.library.register_fake("dash_guard::observe", lambda tensors, names, scratch: None, lib=_lib)
for _device in ("CPU", "CUDA"):
    _lib.impl("observe", _observe, _device)
