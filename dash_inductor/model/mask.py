"""The mask of an attention call: `Mask`, a conjunction of terms, each a rule or a tensor that arrives at run time."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

from ..errors import ArgumentError
from .terms import TERMS, Dense, Interval, Keys, Operand, Placed, Segments, Term

MAX_LENGTH = 2**30 - 1
"""Longest sequence, and farthest bound of a band: the kernels compute with positions in int32."""

ALIGNMENT = 128
"""A multiple of so many positions begins a tile of queries and a tile of keys, in every kernel."""

ROW_BLOCK = 64
"""Positions of a row block: of the queries of a consumer of the Hopper forward, and of tokens that `Placed` places."""

Anchor = Literal["top_left", "bottom_right"]


@dataclass(frozen=True)
class Band:
    """A mask in normal form: query i sees key j iff ``lo <= i + offset - j <= hi``.

    Args:
        lo, hi: bounds in tokens; None means unbounded.
        anchor: offset is 0 for "top_left", ``kv_len - q_len`` for "bottom_right" (only there do lengths matter).
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
            object.__setattr__(self, "anchor", "top_left")  # one spelling of the full mask

    @property
    def is_full(self) -> bool:
        return self.lo is None and self.hi is None

    @property
    def is_window(self) -> bool:
        """Whether it has two bounds: every query sees some keys next to one another, wherever it is."""
        return self.lo is not None and self.hi is not None

    def resolve(self, q_len: int, kv_len: int) -> Band:
        """The same mask anchored top left, for known lengths; bounds that exclude nothing become None."""
        offset = kv_len - q_len if self.anchor == "bottom_right" else 0
        lo = None if self.lo is None else self.lo - offset
        hi = None if self.hi is None else self.hi - offset
        if lo is not None and lo <= -(kv_len - 1):
            lo = None
        if hi is not None and hi >= q_len - 1:
            hi = None
        return Band(lo, hi)

    def visible(self, i: int, j: int, q_len: int, kv_len: int) -> bool:
        """Whether query i (0-based) sees key j."""
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
        """Inverse of ``str``."""
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


@dataclass(frozen=True)
class Mask:
    """A conjunction of terms, at most one of each kind: a query sees the keys that every term lets it see.

    ``str`` gives for example ``full``, ``keys(0)``, ``causal & segments(0,0) & keys(1)`` or
    ``segments(0,1):placed(2,3)``; `parse` reads it back.

    Raises:
        ArgumentError: segments that are placed, beside another term.
    """

    band: Band = Band()
    keys: Keys | None = None
    segments: Segments | None = None
    dense: Dense | None = None
    interval: Interval | None = None

    def __post_init__(self) -> None:
        if self.placed is not None and len(self.terms) > 1:
            raise ArgumentError("mask", str(self), "no other terms beside segments that are placed")

    @property
    def placed(self) -> Placed | None:
        """The places of the tokens of rows; None where tokens are rows."""
        return None if self.segments is None else self.segments.placed

    @functools.cached_property  # every call asks
    def terms(self) -> dict[str, Term]:
        """The terms beside the band, by name, in the order of `TERMS`."""
        found = {name: getattr(self, name) for name in TERMS}
        return {name: term for name, term in found.items() if term is not None}

    @property
    def by_query(self) -> bool:
        """Whether data show other keys to some queries than to others, as documents do: segments or an interval."""
        return self.segments is not None or self.interval is not None

    @functools.cached_property  # every call asks
    def operands(self) -> tuple[Operand, ...]:
        """The tensors that the terms read, each once."""
        return tuple(dict.fromkeys(operand for term in self.terms.values() for operand in term.operands))

    def __str__(self) -> str:
        others = [*map(str, self.terms.values())]
        return " & ".join([*([] if self.band.is_full and others else [str(self.band)]), *others])

    @staticmethod
    def parse(text: str) -> Mask:
        """Inverse of ``str``.

        Raises:
            ArgumentError: an unknown term, or two terms of one kind.
        """
        bands: list[Band] = []
        terms: dict[str, Term] = {}
        for part in text.split(" & "):
            name = part.partition("(")[0]
            if name not in TERMS:
                bands.append(Band.parse(part))
                continue
            if name in terms:
                raise ArgumentError("mask", text, f"at most one {name}(...)")
            terms[name] = TERMS[name].parse(part)
        if len(bands) > 1:
            raise ArgumentError("mask", text, "at most one band; terms are joined by ' & '")
        return Mask(*bands, **terms)  # type: ignore[arg-type]  # the names of TERMS are the fields
