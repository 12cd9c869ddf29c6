"""Decomposes mask functions into factories and constants, and rebuilds them inside a compiled function.

Libraries write a mask as a function ``mask(batch, head, query, key)`` of broadcastable index tensors, and make it with
nested factories, anew for every step.  A `MaskProgram` is what does not change between steps: the factories and their
constants.  The tensors that the functions read are kept apart from it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor


class MaskFunction(Protocol):
    """A mask function as transformers writes it: returns which (query, key) pairs are visible, as a bool tensor.

    The result has the shape to which the four index tensors broadcast, or one that broadcasts to it.
    """

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class Operand:
    """A placeholder for a tensor in the rule of a mask function: its index in the list of operands."""

    number: int

    def __str__(self) -> str:
        return f"operand {self.number}"


@dataclass(frozen=True)
class Made:
    """A function that a factory returned: the factory and its arguments.

    Each argument is an `Operand`, another `Made`, or a constant.
    """

    factory: Callable[..., Any]
    arguments: tuple[Hashable, ...]

    def __str__(self) -> str:
        return f"{self.factory.__qualname__}({', '.join(map(_in_words, self.arguments))})"


@dataclass(frozen=True, eq=False)
class MaskProgram:
    """How to rebuild a mask from the tensors that it reads; equal programs are the same object.

    Attributes:
        rule: how the mask function is made: a `Made` or a module-level function.
        from_the_end: whether the last query aligns with the last key; else the first query aligns with the first key.
    """

    rule: Hashable
    from_the_end: bool

    def __str__(self) -> str:
        return f"{_in_words(self.rule)}, positions from the {'end' if self.from_the_end else 'start'}"

    def __reduce__(self) -> tuple[Any, ...]:
        return program, (self.rule, self.from_the_end)

    def __call__(self, operands: Sequence[Tensor], shape: Sequence[int], device: torch.device) -> Tensor:
        """Computes the mask, bool [batch, 1, queries, keys]; dimensions that do not matter are expanded, not
        materialized.

        Args:
            operands: the tensors that it reads.
            shape: [batch, 1, queries, keys].
            device: the device of the result.
        """
        batch, _, queries, keys = shape
        first = keys - queries if self.from_the_end else 0
        seen: Tensor = made_of(self.rule, operands)(
            torch.arange(batch, device=device)[:, None, None, None],
            torch.arange(1, device=device)[None, :, None, None],
            (torch.arange(queries, device=device) + first)[None, None, :, None],
            torch.arange(keys, device=device)[None, None, None, :],
        )
        return seen.expand(batch, 1, queries, keys)


def _in_words(rule: Hashable) -> str:
    return rule.__qualname__ if isinstance(rule, FunctionType) else str(rule)


_PROGRAMS: dict[tuple[Hashable, bool], MaskProgram] = {}


def program(rule: Hashable, from_the_end: bool) -> MaskProgram:
    """Returns the unique `MaskProgram` for a rule and an alignment, so that programs can be compared by identity."""
    return _PROGRAMS.setdefault((rule, from_the_end), MaskProgram(rule, from_the_end))


def made_of(rule: Any, operands: Sequence[Tensor]) -> Any:
    """Rebuilds a mask function from its rule, inserting the tensors in `operands`.

    A rule may also describe an argument of a mask function's factory: a tensor (`Operand`) or a constant.
    """
    if isinstance(rule, Operand):
        return operands[rule.number]
    if isinstance(rule, Made):
        return rule.factory(*[made_of(argument, operands) for argument in rule.arguments])
    return rule


def taken_apart(function: object, operands: list[Tensor]) -> Hashable | None:
    """Finds the rule from which `made_of` can rebuild a mask function, and appends its tensors to `operands`.

    Returns None if the function's factory cannot be determined.  A factory is a module-level function that returns an
    inner function, whose closure contains only parameters of the factory.
    """
    if not isinstance(function, FunctionType):
        return None
    if not function.__closure__:
        return function if _found_by_name(function) else None
    factory = _factory(function)
    if factory is None:
        return None
    cells = dict(zip(function.__code__.co_freevars, (c.cell_contents for c in function.__closure__), strict=True))
    arguments = _arguments(factory.__code__, cells)
    if arguments is None:
        return None
    rules = [_argument(value, operands) for value in arguments]
    return Made(factory, tuple(rules)) if None not in rules and _is_made_again(function, factory, arguments) else None


def _argument(value: object, operands: list[Tensor]) -> Hashable | None:
    if isinstance(value, Tensor):
        operands.append(value)
        return Operand(len(operands) - 1)
    return value if type(value) is int else taken_apart(value, operands)


def _is_made_again(function: FunctionType, factory: FunctionType, arguments: Sequence[Any]) -> bool:
    """Whether the factory called with these arguments makes an equal function: the same code and closure values."""
    again = factory(*arguments)
    if not isinstance(again, FunctionType) or again.__code__ is not function.__code__:
        return False
    cells = [[cell.cell_contents for cell in made.__closure__ or ()] for made in (function, again)]
    return all(_is_same(before, after) for before, after in zip(*cells, strict=True))


def _is_same(before: object, after: object) -> bool:
    if isinstance(before, tuple) and isinstance(after, tuple):
        return len(before) == len(after) and all(map(_is_same, before, after))
    return before is after or (type(before) is type(after) is int and before == after)


def _found_by_name(function: FunctionType) -> bool:
    return function.__globals__.get(function.__name__) is function


def _factory(function: FunctionType) -> FunctionType | None:
    """The module-level function in whose body a function was defined; None if there is none."""
    name, *inner = function.__qualname__.split(".")
    found = function.__globals__.get(name)
    if len(inner) != 2 or not isinstance(found, FunctionType) or found.__closure__ or function.__defaults__:
        return None
    return found if function.__code__ in found.__code__.co_consts else None


def _arguments(code: CodeType, cells: Mapping[str, Any]) -> list[Any] | None:
    """The arguments of a factory's call, from the closure of the function that it returned; None if one is missing."""
    positional, rest = code.co_varnames[: code.co_argcount], code.co_varnames[code.co_argcount :]
    starred = rest[code.co_kwonlyargcount : code.co_kwonlyargcount + 1] if code.co_flags & _VARARGS else ()
    if code.co_kwonlyargcount or code.co_flags & _VARKEYWORDS or set(cells) != {*positional, *starred}:
        return None
    return [*(cells[name] for name in positional), *(value for name in starred for value in cells[name])]


_VARARGS, _VARKEYWORDS = 4, 8
