"""The arguments of a kernel about one concern: a `Group`, which the kernel takes as one named tuple.

Compiled code has the parameters of the flat list.  A group that is absent is a compile-time None.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ...errors import ArgumentError


class Group(NamedTuple):
    """Arguments about one concern.

    Attributes:
        types: Triton's type of each argument by its name, in the order of the kernel's parameters.
        multiples: what is known to divide an argument; 16 bytes for a pointer that is not in it.
    """

    types: Mapping[str, str]
    multiples: Mapping[str, int] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.types)

    def signature(self) -> tuple[str, ...]:
        """The types as a named tuple, from which device code has the names."""
        return _named(self.types)

    def values(self, **values: Any) -> tuple[Any, ...]:
        """The arguments of a launch in their order.

        Raises:
            ArgumentError: other names than the group has.
        """
        if values.keys() != self.types.keys():
            raise ArgumentError("values", sorted(values), f"values of {sorted(self.types)}")
        return tuple(values[name] for name in self.types)


Groups = Group | None | Mapping[str, Group | None]
"""What a parameter of a kernel may be beside an argument: a group, which may be absent, or a named tuple of groups."""


def signature(of: Groups) -> Any:
    """The types of groups, named as they are; those of an absent one are a constant."""
    if of is None:
        return "constexpr"
    return of.signature() if isinstance(of, Group) else _named({name: signature(group) for name, group in of.items()})


def groups(path: tuple[int, ...], of: Groups) -> list[tuple[tuple[int, ...], Group | None]]:
    """The groups, each with its path through a signature; `path`: that of all of them."""
    if of is None or isinstance(of, Group):
        return [(path, of)]
    return [((*path, i), group) for i, group in enumerate(of.values())]


def integers(*names: str) -> dict[str, str]:
    """The types of int32 arguments of these names."""
    return dict.fromkeys(names, "i32")


def constants(values: tuple[Any, ...]) -> tuple[str, ...]:
    """The signature of a named tuple of compile-time constants."""
    return _named(dict.fromkeys(values._fields, "constexpr"))  # type: ignore[attr-defined]  # it has names


def flat(values: Iterable[Any]) -> Iterator[Any]:
    """Arguments, or their types, with those of groups one by one."""
    for value in values:
        if isinstance(value, tuple):
            yield from flat(value)
        else:
            yield value


def _named(types: Mapping[str, Any]) -> tuple[Any, ...]:
    return namedtuple("Group", types)(**types)
