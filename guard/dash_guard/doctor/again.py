"""Observes a second run of a recorded call: its results, its gradients, and the gradients of its arguments."""

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
    """Observes a second run of a recorded call of the program.

    When the outermost module has returned, it sets the determinism flag to the state under which the backward ran the
    first time, so that the backward runs under the same flag.

    Args:
        names: the names of modules and parameters.
        flag: the state of the flag in the backward of the recorded call.
    """

    def __init__(self, names: Names, flag: Flag) -> None:
        super().__init__(names)
        self._flag = flag

    def returned(self, result: Any) -> None:
        """Observe the result of the outermost module, then set the determinism flag for the backward."""
        super().returned(result)
        self._flag.put()


class Inputs:
    """A forward pre-hook that hashes the gradients of a module's arguments.

    It replaces each argument that requires a gradient by a clone, since in the program, too, it was the result of an
    earlier operation; an argument given twice has one clone.

    Args:
        execution: gets the gradients, as "input 1", "input 2", ...
    """

    def __init__(self, execution: Execution) -> None:
        self._execution = execution

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Put hooks on the arguments' gradients; returns the arguments to use, or None while code is being compiled."""
        if torch.compiler.is_compiling():
            return None
        clones: dict[int, Tensor] = {}

        def handed_on(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.requires_grad:
                return leaf
            if id(leaf) not in clones:
                label, observe = f"input {len(clones) + 1}", self._execution.observe_in_step
                leaf.register_hook(lambda g: None if g is None else observe(phases.LOCAL_GRADIENT, [(label, g)]))
                clones[id(leaf)] = leaf.clone()
            return clones[id(leaf)]

        return tree_map(handed_on, (args, kwargs))
