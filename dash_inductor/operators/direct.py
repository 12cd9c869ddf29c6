"""Lets compiled code call the implementations of our operators without PyTorch's dispatcher.

Dispatching to a Python implementation takes longer than all other host work of a call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..upstream import profiler
from ..upstream.dispatch import OpOverload, mode_count

TAKES_LAYOUTS = "takes_layouts"
"""The attribute of a direct callable that is true if it accepts one more text argument, the layouts of all tensors."""


def call_directly(
    operator: OpOverload, implementation: Callable[..., Any], prepared: Callable[..., Any] | None = None
) -> None:
    """Sets the attribute `direct` of an operator, through which Inductor's generated code calls its implementation.

    While a profiler or a dispatch mode is active, `direct` calls the operator through the dispatcher, so that they see
    it.

    Args:
        operator: the operator.
        implementation: its implementation.
        prepared: a faster variant, which also accepts layouts, see `prepared.Prepared`.
    """
    count, direct = len(operator._schema.arguments), prepared or implementation

    @functools.wraps(implementation)
    def run(*args: Any) -> Any:
        if profiler.is_on() or mode_count():
            return operator(*args[:count])
        return direct(*args)

    setattr(run, TAKES_LAYOUTS, prepared is not None)
    # Generated code finds it, in any process, by a name that begins with the operator's.
    operator.overloadpacket.direct = run
