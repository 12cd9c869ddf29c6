"""Lets compiled code call the implementations of our operators without PyTorch's dispatcher.

Dispatching to a Python implementation takes longer than all other host work of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..upstream import profiler
from ..upstream.dispatch import OpOverload, mode_count

TAKES_LAYOUTS = "takes_layouts"
"""The attribute of a direct callable that is true if it accepts one more text argument, the layouts of all tensors."""


def call_directly(operator: OpOverload, implementation: Callable[..., Any], *, takes_layouts: bool = False) -> None:
    """Sets the attribute `direct` of an operator, through which Inductor's generated code calls its implementation.

    While a profiler or a dispatch mode is active, `direct` calls the operator through the dispatcher, so that they see
    it.

    Args:
        operator: the operator.
        implementation: its implementation.
        takes_layouts: whether the implementation accepts layouts, see `prepared.prepared`.
    """
    count = len(operator._schema.arguments)

    def direct(*args: Any) -> Any:
        if profiler.is_on() or mode_count():
            return operator(*args[:count])
        return implementation(*args)

    setattr(direct, TAKES_LAYOUTS, takes_layouts)
    # Generated code finds it, in any process, by a name that begins with the operator's.
    operator.overloadpacket.direct = direct
