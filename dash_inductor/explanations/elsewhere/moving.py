"""Moves the tensors that a function uses to a GPU that is not present, as fake tensors, inside a block."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...upstream.dispatch import disable_current_modes, is_traceable_wrapper_subclass, transform_subclass
from ...upstream.fake import FakeTensor, FakeTensorMode
from . import Untraceable


@contextmanager
def moved(
    mode: FakeTensorMode, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """A context manager that moves a call's arguments, which it yields, and the function's own tensors to ``cuda``.

    Tensors on the CPU or on ``meta`` are moved, also in nested containers: the arguments; closure and global variables
    used by `fn` and by other functions of its module; the attributes of the object if `fn` is a method; and the
    parameters and buffers of all modules among these.  Other attributes of modules are not moved, as with
    ``module.to("cuda")``.

    Raises:
        Untraceable: a tensor of a kind that cannot be moved.
    """
    mover = _Mover(mode)
    try:
        mover.function(fn)
        yield mover.value(args), mover.value(kwargs)
    finally:
        mover.undo()


class _Mover:
    """Moves values, each once, and can undo its in-place changes."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._seen: dict[int, tuple[Any, Any]] = {}  # keeps the value alive, so that its id stays unique
        self._undo: list[Callable[[], object]] = []

    def undo(self) -> None:
        for action in reversed(self._undo):
            action()

    def value(self, value: Any) -> Any:
        """Returns a value with its tensors moved; modules and functions are changed in place."""
        if id(value) in self._seen:
            return self._seen[id(value)][1]
        self._seen[id(value)] = value, value  # for values that contain themselves
        result = self._moved(value)
        self._seen[id(value)] = value, result
        return result

    def _moved(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, functools.partial):
            return functools.partial(self.value(value.func), *self.value(value.args), **self.value(value.keywords))
        elif callable(value):
            self.function(value)
        elif isinstance(value, MutableMapping):
            self._entries(value, list(value))
        elif isinstance(value, list):
            self._entries(value, range(len(value)))
        elif isinstance(value, tuple):
            parts = tuple(map(self.value, value))
            return type(value)(*parts) if hasattr(value, "_fields") else parts
        elif dataclasses.is_dataclass(value) or type(value).__module__.startswith("torch.nn.attention"):
            held = getattr(value, "__dict__", {})
            self._entries(held, list(held))
        return value

    def function(self, fn: Any) -> None:
        """Moves the variables that a function reads from outside; `fn` may also be a module or a method."""
        if isinstance(fn, nn.Module):
            self.value(fn)
        elif isinstance(fn, types.MethodType):
            if not isinstance(self.value(fn.__self__), nn.Module) and hasattr(fn.__self__, "__dict__"):
                self._entries(vars(fn.__self__), list(vars(fn.__self__)))
            self.function(fn.__func__)
        elif inspect.isfunction(inspect.unwrap(fn)):
            plain = inspect.unwrap(fn)
            for cell in plain.__closure__ or ():
                self._cell(cell)
            known = plain.__globals__
            names = dict.fromkeys(name for name in _names(plain.__code__) if name in known)
            self._entries(known, [name for name in names if _is_beside(known[name], plain)])

    def _module(self, module: nn.Module) -> None:
        for part in module.modules():
            for held in (part._parameters, part._buffers):
                self._entries(held, list(held))

    def _entries(self, held: Any, names: Iterable[Any]) -> None:
        """Moves values of a list or a mapping in place."""
        for name in names:
            old = held[name]
            new = self.value(old)
            if new is not old:
                self._undo.append(functools.partial(held.__setitem__, name, old))
                held[name] = new

    def _cell(self, cell: Any) -> None:
        """Moves a closure variable."""
        try:
            old = cell.cell_contents
        except ValueError:  # no value yet
            return
        new = self.value(old)
        if new is not old:
            self._undo.append(functools.partial(setattr, cell, "cell_contents", old))
            cell.cell_contents = new

    def _tensor(self, tensor: Tensor) -> Tensor:
        if tensor.is_nested and tensor.layout == torch.jagged:
            return self._jagged(tensor)
        if is_traceable_wrapper_subclass(tensor):
            with self._mode:
                return transform_subclass(tensor, lambda name, inner: self.value(inner))
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer, FakeTensor) or tensor.layout != torch.strided:
            raise Untraceable(f"a tensor of the kind {type(tensor).__name__}, {tensor.layout}, cannot be moved")
        if tensor.device.type not in ("cpu", "meta", "cuda"):
            raise Untraceable(f"a tensor on {tensor.device} cannot be moved")
        return self._strided(tensor)

    def _strided(self, tensor: Tensor) -> Tensor:
        device = tensor.device if tensor.device.type == "cuda" else torch.device("cuda", 0)
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.storage_offset()
        with self._mode, torch.no_grad():
            new = torch.empty(start + last + 1 if tensor.numel() else start, dtype=tensor.dtype, device=device)
            new = new.as_strided(tensor.shape, tensor.stride(), start).detach()
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            elif tensor.requires_grad:
                new.requires_grad_()
        vars(new).update({name: value for name, value in vars(tensor).items() if name not in vars(new)})
        return new

    def _jagged(self, tensor: Any) -> Tensor:
        """Moves a jagged nested tensor; tensors with the same offsets keep sharing one symbolic length."""
        with disable_current_modes():
            bounds = {"min_seqlen": tensor._get_min_seqlen(), "max_seqlen": tensor._get_max_seqlen()}
            parts = tensor.values().detach(), tensor.offsets(), tensor.lengths()
        values, offsets, lengths = map(self.value, parts)
        lengthwise = tensor._ragged_idx
        (offsets if lengths is None else lengths).nested_int_memo = tensor.shape[lengthwise]  # keeps its symbol
        with self._mode, torch.no_grad():
            new = torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=lengthwise, **bounds)
            return new.detach().requires_grad_(tensor.requires_grad)


def _names(code: types.CodeType) -> Iterator[str]:
    """The global names that a function, or a function inside it, may use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_beside(value: Any, fn: types.FunctionType) -> bool:
    """Whether a global variable of a function is moved: no class, Python module, or function of another module."""
    if isinstance(value, (type, types.ModuleType)):
        return False
    return not inspect.isfunction(value) or value.__globals__ is fn.__globals__
