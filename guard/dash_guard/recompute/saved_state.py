"""Saves the state of modules apart from their parameters, so that it can be restored after they have run again.

This is their buffers, the attributes that PyTorch does not define, and the variables outside of them that their
forwards reach by name (`reachable`): numbers, tensors, arrays, random number generators, objects of the program, and
those in lists, tuples, dictionaries and sets. A model whose forward may advance an iterator cannot run again.
"""

from __future__ import annotations

import array
import io
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dash_inductor.upstream.eager import compiled_from

from .reachable import MISSING, Variable, is_of_program, variables

_DEPTH = 3  # of containers in containers
_LENGTH = 1 << 10  # of a container of which each element is looked at
_CONTAINERS = (dict, list, deque, set)
_ARRAYS = (bytearray, array.array, numpy.ndarray)
_PYTORCHS = frozenset(vars(nn.Module())) - {"training"}
_BYTES = 64 << 20
"""The largest tensor outside of modules, and the largest array, that is copied."""


class SavedState:
    """A copy of the buffers and attributes of a model's modules, made when this is created.

    Args:
        root: the model.
    """

    def __init__(self, root: nn.Module) -> None:
        self._back: list[Callable[[], object]] = []
        self._seen: set[Any] = set()
        self._cannot = ""
        self.tensors: list[Tensor] = []
        for module in root.modules():
            for name, tensor in module.named_buffers(recurse=False):
                self._save_buffer(module, name, tensor)
            if _is_the_programs(module):
                self._save_attributes(module)
                for variable in variables(module):
                    self._save_variable(variable)

    def why_not_again(self) -> str:
        """Why the model cannot run again: it may write what cannot be put back; "" if nothing of the kind was found."""
        return self._cannot

    def restore(self) -> None:
        """Assign the saved buffers and attributes to the modules again, and copy their saved values back.

        Values of buffers are always written, because some operators write to them without changing their versions. The
        versions of tensors stay the same, because for the training nothing was written.
        """
        for back in self._back:
            back()

    def _save_buffer(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        def back() -> None:
            if getattr(module, name) is not tensor:
                setattr(module, name, tensor)

        self._back.append(back)
        self._save_values(tensor, always=not _repeats(tensor))

    def _save_values(self, tensor: Tensor, always: bool = False) -> None:
        """Save the values of a tensor, which are restored if its version has changed, or always."""
        values, version = tensor.detach().clone(), -1 if tensor.is_inference() else tensor._version

        def back() -> None:
            if always or (version >= 0 and tensor._version != version):
                tensor.data.copy_(values)

        self._back.append(back)
        if version >= 0:
            self.tensors.append(tensor)

    def _save_variable(self, variable: Variable) -> None:
        """Save a variable outside of modules, once."""
        place = id(variable.owner), variable.name
        value = variable.get()
        if place in self._seen or isinstance(value, nn.Module):
            return
        self._seen.add(place)

        def back() -> None:
            if variable.get() is not value:
                variable.set(value)

        self._back.append(back)
        if isinstance(value, Tensor) and value.nbytes > _BYTES:
            self._refuse(f"its forward may write the tensor {variable.name}, which is too large to copy")
        else:
            self._save(value, _DEPTH)

    def _save_attributes(self, thing: nn.Module | object, depth: int = _DEPTH) -> None:
        attributes = {name: value for name, value in vars(thing).items() if name not in _PYTORCHS}

        def back() -> None:
            now = vars(thing)
            for name in [name for name in now if name not in _PYTORCHS and name not in attributes]:
                del now[name]
            for name, value in attributes.items():
                if now.get(name, MISSING) is not value:
                    now[name] = value

        self._back.append(back)
        for value in attributes.values():
            self._save(value, depth)

    def _save(self, value: Any, depth: int) -> None:
        """Save what a mutable value contains."""
        if type(value) is Tensor and not (value.requires_grad and value.is_leaf):
            self._save_values(value)
        elif put := _generator_state(value):
            self._back.append(put)
        elif isinstance(value, numpy.random.Generator):  # mostly without a seed: put back, it would seem to repeat
            self._refuse("its forward may draw from a generator of NumPy")
        elif isinstance(value, _ARRAYS):
            self._save_array(value)
        elif isinstance(value, io.IOBase):
            if not value.closed and value.writable():
                file = getattr(value, "name", type(value).__name__)
                self._refuse(f"its forward may write the file {file}, which is open")
        elif isinstance(value, tuple) and depth:
            for each in value[:_LENGTH]:
                self._save(each, depth - 1)
        elif isinstance(value, _CONTAINERS) and depth:
            self._save_container(value, depth)
        elif isinstance(value, Iterator) and not hasattr(value, "__dict__"):
            self._refuse(f"its forward may advance a {type(value).__name__}, which cannot be put back")
        if _is_object(value) and depth and id(value) not in self._seen:
            self._seen.add(id(value))
            self._save_attributes(value, depth - 1)

    def _refuse(self, why: str) -> None:
        self._cannot = self._cannot or why

    def _save_array(self, value: Any) -> None:
        """Save the elements of an array, which are restored if they have changed; refuse an array that is too large."""
        size = value.nbytes if isinstance(value, numpy.ndarray) else memoryview(value).nbytes
        if size > _BYTES:
            self._refuse(f"its forward may write a {type(value).__name__} that is too large to copy")
            return
        saved = value[...].copy() if isinstance(value, numpy.ndarray) else value[:]

        def back() -> None:
            if isinstance(value, numpy.ndarray):
                if value.tobytes() != saved.tobytes() and value.flags.writeable:
                    numpy.copyto(value, saved)
            elif value != saved:
                value[:] = saved

        self._back.append(back)

    def _save_container(self, value: Any, depth: int) -> None:
        """Save the elements of a container, and what these contain, unless there are very many."""
        inside = dict(value) if isinstance(value, dict) else list(value)
        self._back.append(lambda: _fill(value, inside))
        if len(inside) <= _LENGTH:
            for each in inside.values() if isinstance(inside, dict) else inside:
                self._save(each, depth - 1)


def _generator_state(value: Any) -> Callable[[], object] | None:
    """Returns a function that gives a random number generator its present state again; None for other values."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, random.Random):
        numbers = value.getstate()
        return lambda: value.setstate(numbers)
    if isinstance(value, numpy.random.RandomState):
        words = value.get_state()
        return lambda: value.set_state(words)
    return None


def _is_the_programs(module: nn.Module) -> bool:
    """Whether the class of a module comes from the program; wrappers of PyTorch keep state of their own."""
    if isinstance(module, DistributedDataParallel) or compiled_from(module) is not None:
        return False
    kinds = (kind for kind in type(module).__mro__ if issubclass(kind, nn.Module))
    return any(kind.__module__.split(".")[0] != "torch" for kind in kinds)


def _is_object(value: Any) -> bool:
    """Whether a value is an object of a class of the program, with attributes; modules are looked at by themselves."""
    return isinstance(getattr(value, "__dict__", None), dict) and not (
        isinstance(value, type | nn.Module | Tensor) or callable(value) or not is_of_program(type(value))
    )


def _repeats(tensor: Tensor) -> bool:
    """Whether elements share memory, so that the tensor cannot be written."""
    return tensor.layout == torch.strided and any(
        s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _fill(container: Any, inside: dict[Any, Any] | list[Any]) -> None:
    """Restore the elements of a container, if it has others; by the methods of the base class of its class."""
    same = len(inside) == len(container) and all(a is b for a, b in zip(container, inside, strict=True))
    if isinstance(inside, dict):
        same = same and all(container[key] is value for key, value in inside.items())
    if not same:
        base: Any = next(kind for kind in _CONTAINERS if isinstance(container, kind))
        base.clear(container)
        (base.extend if base in (list, deque) else base.update)(container, inside)
