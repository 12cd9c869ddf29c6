"""Calls of our operators from compiled code, which go to their implementations.

The way through PyTorch's dispatcher to an implementation in Python takes longer than all else that the host does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..upstream import profiler
from ..upstream.dispatch import OpOverload, mode_count

TAKES_LAYOUTS = "takes_layouts"
"""An attribute of what generated code calls: it may be given the layouts of all tensors in one text more."""


def call_directly(
    operator: OpOverload, implementation: Callable[..., Any], prepared: Callable[..., Any] | None = None
) -> None:
    """Let Inductor's code call an operator by its implementation, which it finds as the attribute `direct`.

    A profile and modes of dispatch see the operator as ever, because under them the dispatcher is called.

    Args:
        prepared: the same, which may be given layouts, see `prepared.Prepared`.
    """
    count, direct = len(operator._schema.arguments), prepared or implementation

    @functools.wraps(implementation)
    def run(*args: Any) -> Any:
        if profiler.is_on() or mode_count():
            return operator(*args[:count])
        return direct(*args)

    setattr(run, TAKES_LAYOUTS, prepared is not None)
    # Where generated code finds it by a name that begins like the operator's, in any process.
    operator.overloadpacket.direct = run
