"""Groups of kernel arguments: the arguments that belong to one feature, passed to the kernel as one named tuple.

Compiled code has the parameters of the flattened list.  A group that a kernel does not need is a compile-time None.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ...errors import ArgumentError


class Group(NamedTuple):
    """The signature of the arguments that belong to one feature.

    Attributes:
        types: Triton's type of each argument by name, in the order of the kernel's parameters.
        multiples: known divisors of arguments by name; a pointer that is not listed is a multiple of 16 bytes.
    """

    types: Mapping[str, str]
    multiples: Mapping[str, int] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.types)

    def signature(self) -> tuple[str, ...]:
        """Returns Triton's types of the arguments as a named tuple, from which device code takes their names."""
        return _named(self.types)

    def values(self, **values: Any) -> tuple[Any, ...]:
        """Returns the arguments of a launch, given by name, as a tuple in the order of the signature.

        Raises:
            ArgumentError: the names are not exactly those of the group.
        """
        if values.keys() != self.types.keys():
            raise ArgumentError("values", sorted(values), f"values of {sorted(self.types)}")
        return tuple(values[name] for name in self.types)


Groups = Group | None | Mapping[str, Group | None]
"""What a kernel parameter may be other than a single argument: a group or None, or a named tuple of these."""


def signature(of: Groups) -> Any:
    """Returns the entry in a Triton signature for a kernel parameter that takes one or several groups of arguments.

    This is a named tuple of types for a `Group`, "constexpr" for None, and a named tuple of these entries for several
    groups, given by name.
    """
    if of is None:
        return "constexpr"
    return of.signature() if isinstance(of, Group) else _named({name: signature(group) for name, group in of.items()})


def groups(path: tuple[int, ...], of: Groups) -> list[tuple[tuple[int, ...], Group | None]]:
    """Lists the groups in `of` as pairs (path, group).

    A path is a tuple of indices into the signature; `path` is that of `of` itself.
    """
    if of is None or isinstance(of, Group):
        return [(path, of)]
    return [((*path, i), group) for i, group in enumerate(of.values())]


def integers(*names: str) -> dict[str, str]:
    """Returns the Triton types ("i32") of int32 arguments, by these names."""
    return dict.fromkeys(names, "i32")


def constants(values: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns the signature entry for a named tuple of compile-time constants: "constexpr" under each name."""
    return _named(dict.fromkeys(values._fields, "constexpr"))  # type: ignore[attr-defined]  # it has names


def flat(values: Iterable[Any]) -> Iterator[Any]:
    """Yields kernel arguments, or their types, one by one; the members of tuples (groups) take their tuple's place."""
    for value in values:
        if isinstance(value, tuple):
            yield from flat(value)
        else:
            yield value


def _named(types: Mapping[str, Any]) -> tuple[Any, ...]:
    return namedtuple("Group", types)(**types)
