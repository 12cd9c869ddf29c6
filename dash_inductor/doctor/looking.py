"""Wraps functions so that the doctor sees a program's eager calls of them; compiled code calls the originals."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..upstream.dynamo import skip_code
from ..upstream.patches import replaced
from .libraries import is_layer

_LOOKS = "_dash_inductor_looks_at"


def original(function: Any) -> Any:
    """The function that `looking` has wrapped; a function that is not wrapped is returned itself."""
    return getattr(function, _LOOKS, function)


def looking(function: Callable[..., Any], look: Callable[..., None]) -> Callable[..., Any]:
    """Wraps a function so that `look` gets its arguments before each eager call; compiled code ignores the wrapper."""
    look = torch.compiler.disable(look)  # after a graph break, Dynamo sees the calls

    @functools.wraps(function)
    def looked_at(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            look(*args, **kwargs)
        return function(*args, **kwargs)

    marked: Any = looked_at
    setattr(marked, _LOOKS, function)
    # Dynamo does not compile eager calls of the wrapper by itself, but inlines it into compiled functions.
    skip_code(marked.__code__)
    return looked_at


def functions_looked_at(look: Callable[..., None]) -> AbstractContextManager[None]:
    """A context manager in which `look` is called before the `apply` of every autograd function runs.

    Autograd functions that are defined inside the block are included.
    """
    of_class = inspect.getattr_static(torch.autograd.Function, "apply")  # in C from torch 2.15 on

    def apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        return of_class.__get__(None, function)(*args, **kwargs)

    return replaced(torch.autograd.Function, {"apply": classmethod(looking(apply, look))})


@contextmanager
def layers_looked_at(looks: dict[str, Callable[..., None]]) -> Iterator[None]:
    """A context manager in which a function is called before certain methods of other libraries' attention layers.

    Layers are classes for which `is_layer` is true; those that are defined inside the block are included.

    Args:
        looks: for the name of each method, the function that is called before it.
    """
    with ExitStack() as stack:

        def look_at(layer: type) -> None:
            if is_layer(layer):
                own = {name: looking(vars(layer)[name], look) for name, look in looks.items() if name in vars(layer)}
                stack.enter_context(replaced(layer, own))

        def made(layer: type[Any], /, **kwargs: Any) -> None:
            super(nn.Module, layer).__init_subclass__(**kwargs)
            look_at(layer)

        for layer in _subclasses(nn.Module):
            look_at(layer)
        stack.enter_context(replaced(nn.Module, {"__init_subclass__": classmethod(made)}))
        yield


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    found: list[type[Any]] = cls.__subclasses__()
    for one in found:
        yield one
        yield from _subclasses(one)
