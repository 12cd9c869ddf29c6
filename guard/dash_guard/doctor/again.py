"""Observes a call while it is made again: its results, its gradients, and the gradients of its arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dash_inductor.doctor.flag import Flag
from dash_inductor.observers import phases
from dash_inductor.observers.names import Names
from dash_inductor.upstream.pytree import tree_map

from ..recompute.execution import Execution


class Again(Execution):
    """Observes a repetition, and sets the determinism flag of its backward to what it was."""

    def __init__(self, names: Names, flag: Flag) -> None:
        super().__init__(names)
        self._flag = flag

    def returned(self, result: Any) -> None:
        """The outermost module has returned."""
        super().returned(result)
        self._flag.put()


class Inputs:
    """Hashes the gradients of arguments, and passes the arguments on as results of an earlier operation, as they
    were.
    """

    def __init__(self, execution: Execution) -> None:
        self._execution = execution

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Called by the module."""
        if torch.compiler.is_compiling():
            return None
        number = 0

        def handed_on(leaf: Any) -> Any:
            nonlocal number
            if not isinstance(leaf, Tensor) or not leaf.requires_grad:
                return leaf
            number += 1
            label, observe = f"input {number}", self._execution.observe_in_step
            leaf.register_hook(lambda g: None if g is None else observe(phases.LOCAL_GRADIENT, [(label, g)]))
            return leaf.clone()

        return tree_map(handed_on, (args, kwargs))
