"""Finds the variables outside of a module that its forward reaches by name.

A forward may count its calls in a global, in a cell of a closure, or in an attribute of a class or of an object. If
such a call ran again, it would count twice.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

MISSING = object()
"""The value of a variable that is not set."""
_FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "triton", "dash_inductor", "dash_guard"}
"""Packages whose functions and classes are not those of a program."""


class Variable(NamedTuple):
    """A variable of a program.

    Attributes:
        owner: the globals, the cell, or the class that holds it.
        name: its name there.
    """

    owner: dict[str, Any] | CellType | type
    name: str

    def get(self) -> Any:
        """Returns the value, or `MISSING`."""
        if isinstance(self.owner, dict):
            return self.owner.get(self.name, MISSING)
        if isinstance(self.owner, type):
            return vars(self.owner).get(self.name, MISSING)
        try:
            return self.owner.cell_contents
        except ValueError:
            return MISSING

    def set(self, value: Any) -> None:
        """Sets the variable, or removes it if the value is `MISSING`."""
        if isinstance(self.owner, CellType):
            if value is not MISSING:
                self.owner.cell_contents = value
        elif isinstance(self.owner, type):
            delattr(self.owner, self.name) if value is MISSING else setattr(self.owner, self.name, value)
        elif value is MISSING:
            self.owner.pop(self.name, None)
        else:
            self.owner[self.name] = value


_KNOWN: WeakKeyDictionary[type, list[Variable]] = WeakKeyDictionary()


def variables(module: nn.Module) -> list[Variable]:
    """Returns the variables that a module's forward may read or write, apart from attributes of the module.

    These are the globals and cells that its code names, and the attributes of classes and functions of the program that
    it names or belongs to. Functions and methods that it calls by name are followed, and functions among the module's
    attributes.
    """
    kind = type(module)
    if kind not in _KNOWN:
        _KNOWN[kind] = list(_reached(kind, [kind.forward]))
    own = [value for value in vars(module).values() if isinstance(value, FunctionType | MethodType)]
    return [*_KNOWN[kind], *_reached(kind, own)] if own else _KNOWN[kind]


def is_of_program(thing: Any) -> bool:
    """Returns whether a function, a class or the class of an object is the program's, and of no known library."""
    name = getattr(thing, "__module__", None)
    return isinstance(name, str) and name.split(".")[0] not in _FOREIGN


def _reached(kind: type, functions: list[Any]) -> Iterator[Variable]:
    seen = set[Any]()
    for cls in kind.__mro__:
        yield from _attributes(cls, seen)
    while functions:
        function = functions.pop()
        function = function.__func__ if isinstance(function, MethodType) else function
        if not isinstance(function, FunctionType) or function in seen or not is_of_program(function):
            continue
        seen.add(function)
        named = [Variable(function.__globals__, name) for name in sorted(_names(function.__code__))]
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for variable in [*named, *(Variable(cell, name) for name, cell in cells)]:
            functions.append(getattr(kind, variable.name, None))
            value = variable.get()
            if isinstance(value, FunctionType | MethodType):
                functions.append(value)
                own = getattr(value, "__func__", value).__dict__
                yield from (Variable(own, key) for key in own if is_of_program(value))
            elif isinstance(value, type):
                yield from _attributes(value, seen)
            elif value is not MISSING and not isinstance(value, ModuleType):
                yield variable


def _attributes(cls: type, seen: set[Any]) -> Iterator[Variable]:
    """The attributes of a class of the program that are no functions; none of a class that was seen before."""
    if cls in seen or not is_of_program(cls):
        return
    seen.add(cls)
    for name, value in vars(cls).items():
        if not name.startswith("__") and not callable(value) and not hasattr(value, "__get__"):
            yield Variable(cls, name)


def _names(code: CodeType) -> set[str]:
    """The names that code and the functions defined in it use."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names
