"""A cache, for each operator, of the launchers that run its kernels.

Which kernels a call runs, and with which arguments, depends only on its text arguments and on the dtypes, devices,
shapes and strides of its tensors; between calls usually only addresses change.  So the first call with a combination of
layouts builds a launcher, and later calls look it up, which takes less host time than deriving everything again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..config import config
from ..kernels.execution import Run

Texts = tuple[str, str, str]
"""The call, the plan and the site's name, as the operators' text arguments."""
Prepare = Callable[[Sequence[Tensor], Sequence[Tensor], Texts], Run]
"""A function (tensors, extras, texts) -> what runs calls with tensors of these layouts under the current settings."""
_KEPT = 1024
"""The maximum number of prepared layouts; with dynamic sizes there may be arbitrarily many."""


def prepared(prepare: Prepare, tensors: int) -> Callable[..., Any]:
    """Returns an operator's implementation that builds a launcher for each combination of tensor layouts and caches it.

    The implementation is called as (*tensors, extras, spec, plan, site name) -> results.  The caller may append one
    text that identifies the layouts of all tensors; then they are not computed again.

    Args:
        prepare: returns the function that runs calls with given layouts.
        tensors: the number of tensors before `extras`.
    """
    known: dict[Any, Run] = {}
    layouts = tensors + 4  # the argument after the extras and three texts

    def call(*args: Any) -> Any:
        of_call, extras = args[:tensors], args[tensors]
        key: tuple[Any, ...] = args[tensors + 1 :], config.profile
        if len(args) == layouts:
            key = *key, *[(t.dtype, t.device, t.shape, t.stride()) for t in (*of_call, *extras)]
        run = known.get(key)
        if run is None:
            if len(known) >= _KEPT:
                known.clear()
            run = known[key] = prepare(of_call, extras, args[tensors + 1 : layouts])
        return run(args)

    return call
