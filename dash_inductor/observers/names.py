"""Names of modules and parameters that do not depend on wrappers, so that they are the same in every run."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from ..upstream.eager import compiled_from

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def inner(module: nn.Module) -> nn.Module | None:
    """The module inside a wrapper of PyTorch (DataParallel, DDP, `torch.compile`); None for any other module."""
    if isinstance(module, (DataParallel, DistributedDataParallel)):
        found: nn.Module = module.module
        return found
    return compiled_from(module)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside all wrappers of PyTorch around it."""
    while (next_ := inner(module)) is not None:
        module = next_
    return module


def state_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """The state tensors that an optimizer keeps for a parameter, by name and sorted; for example `exp_avg` of Adam.

    Recordings name them by the path of the parameter followed by this name.
    """
    state = optimizer.state.get(parameter) or {}
    return {str(key): state[key] for key in sorted(state, key=str) if isinstance(state[key], Tensor)}


class Names:
    """Names modules and parameters by their paths from root modules (models).

    Paths within the first root that has parameters have no prefix; those within other roots begin with the class of the
    root.

    Args:
        bare: whether the first root has no prefix; otherwise all roots have one.
    """

    def __init__(self, bare: bool = True) -> None:
        self._bare = bare
        self._modules: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._parameters = WeakTensorKeyDictionary()
        self._roots: dict[str, int] = {}
        self._nowhere: set[int] = set()  # ids of parameters that were searched for in vain

    def __contains__(self, module: nn.Module) -> bool:
        """Whether a module belongs to a model that was added."""
        return unwrapped(module) in self._modules

    def add(self, root: nn.Module) -> None:
        """Adds a model: names those of its modules and parameters that have no name yet, by their paths in it."""
        root = unwrapped(root)
        if root in self._modules:
            return
        prefix = self._prefix(root)
        for path, module in root.named_modules():
            self._modules.setdefault(module, _joined(prefix, path))
        for path, parameter in root.named_parameters():
            self._parameters.setdefault(parameter, _joined(prefix, path))

    def _prefix(self, root: nn.Module) -> str:
        has_parameters = next(root.parameters(), None) is not None
        if self._bare and has_parameters and "" not in self._roots:
            self._roots[""] = 1
            return ""
        kind = type(root).__name__
        self._roots[kind] = self._roots.get(kind, 0) + 1
        return kind if self._roots[kind] == 1 else f"{kind}({self._roots[kind]})"

    def of_module(self, module: nn.Module) -> str:
        """The path of a module, or its class name if it belongs to no model that was added."""
        return self._modules.get(unwrapped(module)) or type(unwrapped(module)).__name__

    def of_buffer(self, module: nn.Module, name: str) -> str:
        """The path of a buffer, given by its module and its name in the module."""
        return _joined(self._modules.get(module, ""), name)

    def of_parameter(self, parameter: Tensor) -> str:
        """The path of a parameter; its model must have been added."""
        return str(self._parameters[parameter])

    def knows(self, parameter: Tensor) -> bool:
        """Whether a parameter belongs to a model that was added."""
        return parameter in self._parameters

    def of_parameters(self, optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
        """All parameters of an optimizer with their paths.

        If a parameter's model has not been added, all live modules are searched for it; a parameter that belongs to no
        module is named by its position in the optimizer.
        """
        groups = [group["params"] for group in optimizer.param_groups]
        unknown = {id(parameter) for group in groups for parameter in group if parameter not in self._parameters}
        if unknown - self._nowhere:
            self._look_for(unknown)
            self._nowhere = unknown
        kind = type(optimizer).__name__
        return [
            (self._parameters.get(parameter) or f"{kind}.{number}.{place}", parameter)
            for number, group in enumerate(groups)
            for place, parameter in enumerate(group)
        ]

    def _look_for(self, unknown: set[int]) -> None:
        things: list[Any] = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
        modules: list[nn.Module] = [thing for thing in things if "_modules" in vars(thing)]  # __init__ has run
        inside = {id(child) for module in modules for child in module.modules() if child is not module}
        found: list[tuple[int, str, int, nn.Module]] = []
        for module in modules:
            count = sum(id(parameter) in unknown for parameter in module.parameters())
            if count and id(module) not in inside:
                found.append((-count, type(unwrapped(module)).__name__, len(found), module))
        for *_, module in sorted(found):
            self.add(module)


def _joined(prefix: str, path: str) -> str:
    return ".".join(part for part in (prefix, *path.split(".")) if part and part not in _WRAPPERS)
