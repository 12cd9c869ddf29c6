"""Detects when a backward has ended: gradients are reduced by then, and nothing has used them yet."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dash_inductor.upstream.eager import at_end_of_backward, backward_number, in_backward, not_compiled
from dash_inductor.upstream.pytree import tree_leaves

_LAST = 2
"""How often the callback at the end of a backward queues itself again, after callbacks of DDP and FSDP2."""


class Backwards:
    """Calls a function at the end of each backward that begins at a result of an outermost module.

    Args:
        ended: is called at the end of each backward, on the thread and streams that have started it, or on an autograd
            thread during it.
        failed: is called with an error, instead of raising it in the program.
    """

    def __init__(self, ended: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        self._ended, self._failed = ended, failed
        self._depth, self._number = 0, -1

    def module_begins(self) -> None:
        """Count the start of a module's forward, so that `module_ended` can tell which modules are outermost."""
        self._depth += 1

    @not_compiled
    def module_ended(self, result: Any) -> None:
        """Count the end of a module's forward, and put hooks on the results of an outermost module."""
        self._depth = max(0, self._depth - 1)
        if self._depth or in_backward() or not torch.is_grad_enabled():
            return
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                leaf.register_hook(self._begins)

    @not_compiled
    def _begins(self, gradient: Tensor) -> None:
        number = backward_number()
        if number != self._number:
            self._number = number
            self._safely(functools.partial(at_end_of_backward, functools.partial(self._wait, _LAST)))

    def _wait(self, times: int) -> None:
        then = self._ended
        if times:
            then = functools.partial(at_end_of_backward, functools.partial(self._wait, times - 1))
        self._safely(then)

    def _safely(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._failed(error)
