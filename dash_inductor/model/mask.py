"""The mask of an attention call: `Mask`, a conjunction of terms, each a rule or a tensor that arrives at run time."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

from ..errors import ArgumentError

MAX_LENGTH = 2**30 - 1
"""Longest sequence, and farthest bound of a band: the kernels compute with positions in int32."""

ALIGNMENT = 128
"""A multiple of so many positions begins a tile of queries and a tile of keys, in every kernel."""

ROW_BLOCK = 64
"""Positions of a row block: of the queries of a consumer of the Hopper forward, and of tokens that `Placed` places."""

_TERM = re.compile(r"(keys|dense)\((\d+)\)|(segments)\((\d+),(\d+)\)(?::placed\((\d+),(\d+)\))?")

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
class Operand:
    """A tensor that a term reads, by its place in the operator's list `extras`."""

    index: int

    def __post_init__(self) -> None:
        if self.index < 0:
            raise ArgumentError("operand", self.index, "an index >= 0 into the operator's extras")


@dataclass(frozen=True)
class Keys:
    """A term of a mask: key j of batch element b is hidden from every query unless ``valid[b, j]``.

    Args:
        valid: a bool tensor [batch, kv_len], any strides, any values.
    """

    valid: Operand

    def __str__(self) -> str:
        return f"keys({self.valid.index})"


@dataclass(frozen=True)
class Placed:
    """The places of packed tokens: the mask is one of *rows*, each of which has one token or none.

    Row blocks of `ROW_BLOCK` rows have tokens that follow one another.  Every document begins at a row that is a
    multiple of `ALIGNMENT`, so that no tile has rows of two of them, and up to its end its row blocks have its next
    tokens.  Lengths of the mask, ids of segments and the log-sum-exp have rows; query, key, value, the output and
    gradients have tokens, in one batch element.

    Args:
        place: int32 [row blocks], contiguous: the token of the first row of each, or, where none has a token, any
            number of at least 0.
        count: int32 [row blocks], contiguous: how many rows of each have a token, the first ones of it; 0 to
            `ROW_BLOCK`.  There are tokens for all of them, and every token has one row.
    """

    place: Operand
    count: Operand

    def __str__(self) -> str:
        return f"placed({self.place.index},{self.count.index})"


@dataclass(frozen=True)
class Segments:
    """A term of a mask: query i of batch element b sees key j only if ``q[b, i] == kv[b, j]``.

    Args:
        q, kv: integer tensors [batch, q_len] and [batch, kv_len], any strides, any values; they may be one tensor.
        placed: where the tokens of rows lie, None where tokens are rows.  A row without a token sees no key and is seen
            by no query, and every other row sees itself.
    """

    q: Operand
    kv: Operand
    placed: Placed | None = None

    def __str__(self) -> str:
        return f"segments({self.q.index},{self.kv.index})" + ("" if self.placed is None else f":{self.placed}")


@dataclass(frozen=True)
class Dense:
    """A term of a mask: query i of head h of batch element b sees key j only where ``mask[b, h, i, j]``.

    Args:
        mask: a bool tensor [batch, heads, q_len, kv_len], any strides; it has size 1 along dimensions that do not
            matter.
    """

    mask: Operand

    def __str__(self) -> str:
        return f"dense({self.mask.index})"


@dataclass(frozen=True)
class Mask:
    """A conjunction of terms, at most one of each kind: a query sees the keys that every term lets it see.

    ``str`` gives for example ``full``, ``keys(0)``, ``causal & segments(0,0) & keys(1)`` or
    ``segments(0,1):placed(2,3)``; `parse` reads it back.

    Raises:
        ArgumentError: segments that are placed, beside valid keys or a dense mask.
    """

    band: Band = Band()
    keys: Keys | None = None
    segments: Segments | None = None
    dense: Dense | None = None

    def __post_init__(self) -> None:
        if self.placed is not None and not (self.keys is None and self.dense is None):
            raise ArgumentError("mask", str(self), "no keys(...) and no dense(...) beside segments that are placed")

    @property
    def placed(self) -> Placed | None:
        """The places of the tokens of rows; None where tokens are rows."""
        return None if self.segments is None else self.segments.placed

    @property
    def terms(self) -> dict[str, Keys | Segments | Dense]:
        """The terms beside the band, by name."""
        found = {"segments": self.segments, "keys": self.keys, "dense": self.dense}
        return {name: term for name, term in found.items() if term is not None}

    @functools.cached_property  # every call asks
    def operands(self) -> tuple[Operand, ...]:
        """The tensors that the terms read, each once."""
        of_segments = () if self.segments is None else (self.segments.q, self.segments.kv)
        of_placed = () if self.placed is None else (self.placed.place, self.placed.count)
        of_keys = () if self.keys is None else (self.keys.valid,)
        of_dense = () if self.dense is None else (self.dense.mask,)
        return tuple(dict.fromkeys((*of_segments, *of_placed, *of_keys, *of_dense)))

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
        others: dict[str, tuple[Operand, ...]] = {}
        for term in text.split(" & "):
            match = _TERM.fullmatch(term)
            if match is None:
                bands.append(Band.parse(term))
                continue
            name, *places = (group for group in match.groups() if group is not None)
            if name in others:
                raise ArgumentError("mask", text, f"at most one {name}(...)")
            others[name] = tuple(Operand(int(place)) for place in places)
        if len(bands) > 1:
            raise ArgumentError("mask", text, "at most one band; terms are joined by ' & '")
        segments = None
        if "segments" in others:
            q, kv, *placed = others["segments"]
            segments = Segments(q, kv, Placed(*placed) if placed else None)
        return Mask(
            bands[0] if bands else Band(),
            Keys(*others["keys"]) if "keys" in others else None,
            segments,
            Dense(*others["dense"]) if "dense" in others else None,
        )
