"""The attention mask: `Mask`, the intersection of a band and of components, whose tensors are known at run time."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ArgumentError
from .components import COMPONENTS, Component, Operand, Segments, VarlenLayout

MAX_LENGTH = 2**30 - 1
"""The longest sequence and the largest absolute bound of a band: kernels compute positions in int32."""

ALIGNMENT = 128
"""In every kernel, each multiple of this many positions begins a tile of queries and a tile of keys."""

ROW_BLOCK = 64
"""Positions in a row block: the queries of a consumer warp group of the Hopper forward, or an entry of `VarlenLayout`.
"""

Anchor = Literal["top_left", "bottom_right"]


@dataclass(frozen=True)
class Band:
    """A band mask in normal form: query i sees key j iff ``lo <= i + offset - j <= hi``.

    Args:
        lo, hi: bounds in tokens; None means unbounded.
        anchor: the offset is 0 for "top_left" and ``kv_len - q_len`` for "bottom_right", the only case that depends on
            lengths.

    Raises:
        ArgumentError: an unknown anchor, or ``lo > hi``.
    """

    lo: int | None = None
    hi: int | None = None
    anchor: Anchor = "top_left"

    def __post_init__(self) -> None:
        if self.anchor not in ("top_left", "bottom_right"):
            raise ArgumentError("anchor", self.anchor, ("top_left", "bottom_right"))
        if self.lo is not None and self.hi is not None and self.lo > self.hi:
            raise ArgumentError("hi", self.hi, f"None or an integer >= lo={self.lo}")
        if self.is_full and self.anchor != "top_left":
            object.__setattr__(self, "anchor", "top_left")  # canonical form of the full mask

    @property
    def is_full(self) -> bool:
        """Whether neither bound is set, so that every query sees every key."""
        return self.lo is None and self.hi is None

    @property
    def is_window(self) -> bool:
        """Whether both bounds are set (a sliding window), so that each query sees a bounded number of adjacent keys."""
        return self.lo is not None and self.hi is not None

    def resolve(self, q_len: int, kv_len: int) -> Band:
        """Return the band anchored top left that shows the same pairs at these lengths.

        A bound that excludes nothing becomes None.
        """
        offset = kv_len - q_len if self.anchor == "bottom_right" else 0
        lo = None if self.lo is None else self.lo - offset
        hi = None if self.hi is None else self.hi - offset
        if lo is not None and lo <= -(kv_len - 1):
            lo = None
        if hi is not None and hi >= q_len - 1:
            hi = None
        return Band(lo, hi)

    def visible(self, i: int, j: int, q_len: int, kv_len: int) -> bool:
        """Return whether query i (0-based) sees key j."""
        d = i - j + (kv_len - q_len if self.anchor == "bottom_right" else 0)
        return (self.lo is None or d >= self.lo) and (self.hi is None or d <= self.hi)

    def __str__(self) -> str:
        if self.is_full:
            return "full"
        if (self.lo, self.hi) == (0, None):
            text = "causal"
        else:
            text = "band({},{})".format(*("none" if x is None else x for x in (self.lo, self.hi)))
        return text if self.anchor == "top_left" else f"{text}:{self.anchor}"

    @staticmethod
    def parse(text: str) -> Band:
        """Parse the result of ``str(band)``.

        Raises:
            ArgumentError: the text was not made by ``str(Band)``.
        """
        body, _, anchor = text.partition(":")
        match = re.fullmatch(r"band\((none|-?\d+),(none|-?\d+)\)", body)
        if body == "full":
            lo, hi = None, None
        elif body == "causal":
            lo, hi = 0, None
        elif match:
            lo, hi = (None if x == "none" else int(x) for x in match.groups())
        else:
            raise ArgumentError("mask", text, "'full', 'causal' or 'band(lo,hi)', optionally with ':bottom_right'")
        return Band(lo, hi, anchor or "top_left")  # type: ignore[arg-type]  # __post_init__ checks it


@dataclass(frozen=True, init=False)
class Mask:
    """A mask: the intersection of a band and of components, at most one of each kind.  A query sees the keys that all
    allow.

    ``str`` gives for example ``full``, ``keys(0)``, ``causal & segments(0,0) & keys(1)`` or
    ``segments(0,1):varlen(2,3)``; `parse` is its inverse.

    Args:
        band: the band mask on positions.
        components: the components besides the band, in any order; None is ignored.
        others: further components.
        named: components by name, each of which replaces the component of this name in `components` and `others`; None
            removes it.

    The component of a kind is also an attribute with the kind's name; it is None if the mask has no component of this
    kind.

    Raises:
        ArgumentError: two components of one kind, or kv ranges both by head and not; a component under another kind's
            name; segments with a varlen layout together with another component.
    """

    band: Band
    others: tuple[Component, ...]

    def __init__(
        self,
        band: Band = Band(),
        *components: Component | None,
        others: tuple[Component, ...] = (),
        **named: Component | None,
    ) -> None:
        given = [
            component for component in (*components, *others) if component is not None and component.NAME not in named
        ]
        given += [component for component in named.values() if component is not None]
        names = [component.NAME for component in given]
        if len(set(names)) != len(names) or any(t is not None and n != t.NAME for n, t in named.items()):
            raise ArgumentError("components", [*map(str, given)], "at most one of each kind, by its own name")
        if not {*names, *named} <= COMPONENTS.keys():
            raise ArgumentError("components", sorted({*names, *named} - COMPONENTS.keys()), [*COMPONENTS])
        object.__setattr__(self, "band", band)
        object.__setattr__(
            self, "others", tuple(sorted(given, key=lambda component: [*COMPONENTS].index(component.NAME)))
        )
        if {"interval", "head_interval"} <= self.components.keys():
            raise ArgumentError("mask", str(self), "one of interval and head_interval")
        if self.varlen_layout is not None and len(self.components) > 1:
            raise ArgumentError("mask", str(self), "no other components beside segments with a varlen layout")

    def __getattr__(self, name: str) -> Any:
        if name in COMPONENTS:
            return self.components.get(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def varlen_layout(self) -> VarlenLayout | None:
        """The varlen layout of packed tokens; None if positions are the rows of the tensors."""
        segments = self.components.get("segments")
        return segments.varlen_layout if isinstance(segments, Segments) else None

    @functools.cached_property  # every call asks
    def components(self) -> dict[str, Component]:
        """The components besides the band, by name, in the order of `COMPONENTS`."""
        return {component.NAME: component for component in self.others}

    @property
    def by_query(self) -> bool:
        """Whether a component reads a number per query, such as a segment id, so that queries see different keys."""
        return any(component.RELATION.queries for component in self.others)

    @functools.cached_property  # every call asks
    def operands(self) -> tuple[Operand, ...]:
        """The tensors that the components read, without duplicates."""
        return tuple(dict.fromkeys(operand for component in self.components.values() for operand in component.operands))

    def __str__(self) -> str:
        others = [*map(str, self.components.values())]
        return " & ".join([*([] if self.band.is_full and others else [str(self.band)]), *others])

    @staticmethod
    def parse(text: str) -> Mask:
        """Parse the result of ``str(mask)``.

        Raises:
            ArgumentError: an unknown component, or two components of one kind.
        """
        bands: list[Band] = []
        components: dict[str, Component] = {}
        for part in text.split(" & "):
            name = part.partition("(")[0]
            if name not in COMPONENTS:
                bands.append(Band.parse(part))
                continue
            if name in components:
                raise ArgumentError("mask", text, f"at most one {name}(...)")
            components[name] = COMPONENTS[name].parse(part)
        if len(bands) > 1:
            raise ArgumentError("mask", text, "at most one band; components are joined by ' & '")
        return Mask(bands[0] if bands else Band(), others=tuple(components.values()))
