"""The terms of a mask beside its band: what each reads, and the relation by which it shows pairs."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import ArgumentError
from .relations import BETWEEN, EQUAL, PAIRS, TRUTH, Axis, Relation

_TEXT = re.compile(r"(\w+)\(([^()]*)\)(?::(\w+)\(([^()]*)\))?")


@dataclass(frozen=True)
class Operand:
    """A tensor that a term reads, by its place in the operator's list `extras`."""

    index: int

    def __post_init__(self) -> None:
        if self.index < 0:
            raise ArgumentError("operand", self.index, "an index >= 0 into the operator's extras")


@dataclass(frozen=True)
class Term:
    """A term of a mask: a relation of a query and a key, by tensors that arrive at run time.

    A subclass is one kind of term; its fields are operands, and ``str`` writes their places, for example ``keys(0)``.

    Attributes:
        NAME: the name in texts, and the attribute of `Mask`.
        RELATION: the relation by which it shows pairs, see Note [Relations].
        ROLES: the role in the relation of each operand, by field.
        OPTIONAL: whether operands may be missing whose roles the relation can do without.
        AXES: the dimensions of each operand's tensor, which follow from the roles.
    """

    NAME: ClassVar[str]
    RELATION: ClassVar[Relation]
    ROLES: ClassVar[Mapping[str, str]]
    OPTIONAL: ClassVar[bool] = False
    AXES: ClassVar[Mapping[str, tuple[Axis, ...]]]

    def __init_subclass__(cls) -> None:
        cls.AXES = {name: cls.RELATION.axes(role) for name, role in cls.ROLES.items()}

    @functools.cached_property
    def given(self) -> dict[str, Operand]:
        """The operands that there are, by field, in the order of the fields."""
        found = {field: getattr(self, field) for field in self.AXES}
        return {field: operand for field, operand in found.items() if operand is not None}

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The tensors that the term reads."""
        return tuple(self.given.values())

    @property
    def has_key_numbers(self) -> bool:
        """Whether it reads numbers of keys, not their positions."""
        return any(self.ROLES[name] in self.RELATION.keys for name in self.given)

    @classmethod
    def shows(cls, values: Mapping[str, Any], kv: Any) -> Any:
        """Whether queries see keys: a truth value for each pair.

        Args:
            values: of the operands that are `given`, numbers or arrays that broadcast to the pairs.
            kv: the positions of the keys, likewise.
        """
        return cls.RELATION.shows({cls.ROLES[name]: value for name, value in values.items()}, kv)

    def __str__(self) -> str:
        operands = (getattr(self, field) for field in self.AXES)
        return f"{self.NAME}({','.join('none' if o is None else str(o.index) for o in operands)})"

    @classmethod
    def parse(cls, text: str) -> Term:
        """Inverse of ``str``.

        Raises:
            ArgumentError: the text is no term of this kind.
        """
        match = _TEXT.fullmatch(text)
        operands = None if match is None or match[3] else _operands(match[2])
        named = match is not None and match[1] == cls.NAME
        if not named or operands is None or len(operands) != len(cls.AXES) or (None in operands and not cls.OPTIONAL):
            raise ArgumentError("mask", text, f"{cls.NAME}(...) with {len(cls.AXES)} places of operands")
        return cls(*operands)


def _operands(text: str) -> list[Operand | None] | None:
    """The operands at these places; None if the text is no list of places."""
    words = text.split(",")
    if not all(re.fullmatch(r"\d+|none", word) for word in words):
        return None
    return [None if word == "none" else Operand(int(word)) for word in words]


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
class Segments(Term):
    """A term of a mask: query i of batch element b sees key j only if ``q[b, i] == kv[b, j]``.

    Args:
        q, kv: integer tensors [batch, q_len] and [batch, kv_len], any strides, any values; they may be one tensor.
        placed: where the tokens of rows lie, None where tokens are rows.  A row without a token sees no key and is seen
            by no query, and every other row sees itself.
    """

    NAME = "segments"
    RELATION = EQUAL
    ROLES: ClassVar[Mapping[str, str]] = {"q": "q", "kv": "kv"}

    q: Operand
    kv: Operand
    placed: Placed | None = None

    @property
    def operands(self) -> tuple[Operand, ...]:
        of_placed = () if self.placed is None else (self.placed.place, self.placed.count)
        return (*self.given.values(), *of_placed)

    def __str__(self) -> str:
        return super().__str__() + ("" if self.placed is None else f":{self.placed}")

    @classmethod
    def parse(cls, text: str) -> Segments:
        match = _TEXT.fullmatch(text)
        ids, places = (None if match is None or not match[i] else _operands(match[i]) for i in (2, 4))
        given = [*(ids or []), *(places or [])]
        named = match is not None and match[1] == "segments" and match[3] in (None, "placed")
        if not named or len(given) != (2 if match is None or match[3] is None else 4) or None in given:
            raise ArgumentError("mask", text, "segments(q,kv), optionally with ':placed(place,count)'")
        q, kv, *placed = (operand for operand in given if operand is not None)
        return Segments(q, kv, Placed(*placed) if placed else None)


@dataclass(frozen=True)
class Keys(Term):
    """A term of a mask: key j of batch element b is hidden from every query unless ``valid[b, j]``.

    Args:
        valid: a bool tensor [batch, kv_len], any strides, any values.
    """

    NAME = "keys"
    RELATION = TRUTH
    ROLES: ClassVar[Mapping[str, str]] = {"valid": "valid"}

    valid: Operand


@dataclass(frozen=True)
class Dense(Term):
    """A term of a mask: query i of head h of batch element b sees key j only where ``mask[b, h, i, j]``.

    Args:
        mask: a bool tensor [batch, heads, q_len, kv_len], any strides; it has size 1 along dimensions that do not
            matter.
    """

    NAME = "dense"
    RELATION = PAIRS
    ROLES: ClassVar[Mapping[str, str]] = {"mask": "shown"}

    mask: Operand


@dataclass(frozen=True)
class Interval(Term):
    """A term of a mask: query i of batch element b sees key j only if ``lo[b, i] <= number[b, j] <= hi[b, i]``.

    ``str`` gives for example ``interval(0,none,none)``, a document that begins at ``lo``, or ``interval(none,0,1)``.

    Args:
        lo, hi: int32 or int64 tensors [batch, q_len], any strides, any values; None for no bound, but not both.
        number: an int32 or int64 tensor [batch, kv_len], any strides, any values; None for the positions of the keys,
            ``number[b, j] == j``.
    """

    NAME = "interval"
    RELATION = BETWEEN
    ROLES: ClassVar[Mapping[str, str]] = {"lo": "least", "hi": "most", "number": "number"}
    OPTIONAL = True

    lo: Operand | None
    hi: Operand | None
    number: Operand | None = None

    def __post_init__(self) -> None:
        if self.lo is None and self.hi is None:
            raise ArgumentError("lo, hi", (None, None), "at least one of them")


TERMS: dict[str, type[Term]] = {term.NAME: term for term in (Segments, Keys, Dense, Interval)}
"""The kinds of terms by name, in the order of texts and of operands."""
