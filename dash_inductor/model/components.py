"""The components of a mask besides its band: the tensors that each reads, and the relation that it applies to them."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import ArgumentError
from .relations import BETWEEN, CONGRUENT, EQUAL, PAIRS, PLANE, TRUTH, Axis, Relation

_TEXT = re.compile(r"(\w+)\(([^()]*)\)(?::(\w+)\(([^()]*)\))?")


@dataclass(frozen=True)
class Operand:
    """A reference to a tensor that a call reads: its index in the operator's argument `extras`.

    Raises:
        ArgumentError: a negative index.
    """

    index: int

    TEXT: ClassVar[str] = r"\d+"
    """A regular expression for ``str(operand)``."""

    def __post_init__(self) -> None:
        if self.index < 0:
            raise ArgumentError("operand", self.index, "an index >= 0 into the operator's extras")

    @property
    def operand(self) -> Operand:
        """The operand itself, because a plain operand is also a `model.operands.Part`."""
        return self

    def __str__(self) -> str:
        return str(self.index)

    @staticmethod
    def parse(text: str) -> Operand:
        """Parse the result of ``str(operand)``."""
        return Operand(int(text))


@dataclass(frozen=True)
class Component:
    """A component of a mask: a relation between queries and keys, given by tensors that are known at run time.

    Each subclass is one kind of component.  Its fields are operands; ``str`` gives their indices, for example
    ``keys(0)``.

    Attributes:
        NAME: the kind's name in texts, and the attribute of `Mask`.
        RELATION: the relation, see Note [Relations].
        ROLES: by field, the role of the operand in the relation.
        OPTIONAL: whether operands may be omitted if the relation allows their roles to be missing.
        BY_HEAD: whether the numbers of a query differ between heads.
        AXES: by field, the dimensions of the operand's tensor, which follow from its role and from `BY_HEAD`.
    """

    NAME: ClassVar[str]
    RELATION: ClassVar[Relation]
    ROLES: ClassVar[Mapping[str, str]]
    OPTIONAL: ClassVar[bool] = False
    BY_HEAD: ClassVar[bool] = False
    AXES: ClassVar[Mapping[str, tuple[Axis, ...]]]

    def __init_subclass__(cls) -> None:
        cls.AXES = {
            name: PLANE if cls.BY_HEAD and role in cls.RELATION.queries else cls.RELATION.axes(role)
            for name, role in cls.ROLES.items()
        }

    @functools.cached_property
    def given(self) -> dict[str, Operand]:
        """The operands that are not None, by the names of their fields, in the order of the fields."""
        found = {field: getattr(self, field) for field in self.AXES}
        return {field: operand for field, operand in found.items() if operand is not None}

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The tensors that the component reads."""
        return tuple(self.given.values())

    @property
    def has_key_numbers(self) -> bool:
        """Whether the component reads a tensor of numbers for the keys, instead of their positions."""
        return any(self.ROLES[name] in self.RELATION.keys for name in self.given)

    @classmethod
    def shows(cls, values: Mapping[str, Any], kv: Any) -> Any:
        """Return a boolean per pair: whether the query sees the key.

        Args:
            values: by field, the values of the operands that are `given`: numbers or arrays that broadcast to the
                pairs.
            kv: the positions of the keys, which broadcast likewise.
        """
        return cls.RELATION.shows({cls.ROLES[name]: value for name, value in values.items()}, kv)

    def __str__(self) -> str:
        operands = (getattr(self, field) for field in self.AXES)
        return f"{self.NAME}({','.join('none' if o is None else str(o.index) for o in operands)})"

    @classmethod
    def parse(cls, text: str) -> Component:
        """Parse the result of ``str(component)``.

        Raises:
            ArgumentError: the text is not a component of this kind.
        """
        match = _TEXT.fullmatch(text)
        operands = None if match is None or match[3] else _operands(match[2])
        named = match is not None and match[1] == cls.NAME
        if not named or operands is None or len(operands) != len(cls.AXES) or (None in operands and not cls.OPTIONAL):
            raise ArgumentError("mask", text, f"{cls.NAME}(...) with {len(cls.AXES)} places of operands")
        return cls(*operands)


def _operands(text: str) -> list[Operand | None] | None:
    """Return the operands with the indices in `text`; None if the text is not a list of indices."""
    words = text.split(",")
    if not all(re.fullmatch(r"\d+|none", word) for word in words):
        return None
    return [None if word == "none" else Operand(int(word)) for word in words]


@dataclass(frozen=True)
class VarlenLayout:
    """The varlen layout of packed tokens: the mask is defined on *rows*, each of which holds one token or none.

    A row block is `ROW_BLOCK` rows whose tokens are consecutive.  Every document begins at a row that is a multiple of
    `ALIGNMENT`, so that no tile contains rows of two documents, and occupies consecutive row blocks up to its end.  The
    lengths of the mask, segment ids and the log-sum-exp are per row; query, key, value, the output and the gradients
    are per token, in one batch element.

    Args:
        token_offset: int32 [row blocks], contiguous: the token in the first row of each row block; any number >= 0 if
            the row block has no token.
        token_count: int32 [row blocks], contiguous: how many rows of each row block hold a token, 0 to `ROW_BLOCK`;
            these are its first rows.  Each of these tokens exists, and every token has exactly one row.

    The segment id of a document is the index of its first row.  Keys of no document have their own row as segment id,
    and queries of no document an id that no key has: they see nothing and are not seen.  Tokens of no document have
    rows that begin at a multiple of `ALIGNMENT`.
    """

    token_offset: Operand
    token_count: Operand

    def __str__(self) -> str:
        return f"varlen({self.token_offset.index},{self.token_count.index})"


@dataclass(frozen=True)
class Segments(Component):
    """Segment ids: query i of batch element b sees key j only if ``q[b, i] == kv[b, j]``.

    Args:
        q, kv: integer tensors [batch, q_len] and [batch, kv_len], any strides, any values; they may be the same tensor.
        varlen_layout: the varlen layout, None if rows are tokens.  Then a row of a document sees the rows of the same
            document that the band shows it, among them itself, and no other row sees a key or is seen by a query.
    """

    NAME = "segments"
    RELATION = EQUAL
    ROLES: ClassVar[Mapping[str, str]] = {"q": "q", "kv": "kv"}

    q: Operand
    kv: Operand
    varlen_layout: VarlenLayout | None = None

    @property
    def operands(self) -> tuple[Operand, ...]:
        of_varlen_layout = (
            () if self.varlen_layout is None else (self.varlen_layout.token_offset, self.varlen_layout.token_count)
        )
        return (*self.given.values(), *of_varlen_layout)

    def __str__(self) -> str:
        return super().__str__() + ("" if self.varlen_layout is None else f":{self.varlen_layout}")

    @classmethod
    def parse(cls, text: str) -> Segments:
        """Parse the result of ``str(segments)``.

        Raises:
            ArgumentError: the text is not a component of segments.
        """
        match = _TEXT.fullmatch(text)
        ids, places = (None if match is None or not match[i] else _operands(match[i]) for i in (2, 4))
        given = [*(ids or []), *(places or [])]
        named = match is not None and match[1] == "segments" and match[3] in (None, "varlen")
        if not named or len(given) != (2 if match is None or match[3] is None else 4) or None in given:
            raise ArgumentError("mask", text, "segments(q,kv), optionally with ':varlen(token_offset,token_count)'")
        q, kv, *varlen_layout = (operand for operand in given if operand is not None)
        return Segments(q, kv, VarlenLayout(*varlen_layout) if varlen_layout else None)


@dataclass(frozen=True)
class Keys(Component):
    """A key padding mask: key j of batch element b is hidden from every query unless ``valid[b, j]``.

    Args:
        valid: a bool tensor [batch, kv_len], any strides, any values.
    """

    NAME = "keys"
    RELATION = TRUTH
    ROLES: ClassVar[Mapping[str, str]] = {"valid": "valid"}

    valid: Operand


@dataclass(frozen=True)
class Dense(Component):
    """A dense mask: query i of head h of batch element b sees key j only if ``mask[b, h, i, j]``.

    Args:
        mask: a bool tensor [batch, heads, q_len, kv_len], any strides; it has size 1 along dimensions that do not
            matter.
    """

    NAME = "dense"
    RELATION = PAIRS
    ROLES: ClassVar[Mapping[str, str]] = {"mask": "shown"}

    mask: Operand


@dataclass(frozen=True)
class Interval(Component):
    """KV ranges: query i of batch element b sees key j only if ``lo[b, i] <= number[b, j] <= hi[b, i]``.

    ``str`` gives for example ``interval(0,none,none)``, a document that begins at ``lo``, or ``interval(none,0,1)``.

    Args:
        lo, hi: int32 or int64 tensors [batch, q_len], any strides, any values; one of them may be None for no bound.
        number: an int32 or int64 tensor [batch, kv_len], any strides, any values; None stands for the positions of the
            keys, ``number[b, j] == j``.

    Raises:
        ArgumentError: both bounds are None.
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


@dataclass(frozen=True)
class HeadInterval(Component):
    """KV ranges by head: query i of head h of batch element b sees key j only if ``lo[b, h, i] <= j <= hi[b, h, i]``.

    Args:
        lo, hi: int32 or int64 tensors [batch, heads, q_len, 1], any strides, any values; they have size 1 along
            dimensions that do not matter.
    """

    NAME = "head_interval"
    RELATION = BETWEEN
    ROLES: ClassVar[Mapping[str, str]] = {"lo": "least", "hi": "most"}
    OPTIONAL = True
    BY_HEAD = True

    lo: Operand | None
    hi: Operand | None

    def __post_init__(self) -> None:
        if self.lo is None and self.hi is None:
            raise ArgumentError("lo, hi", (None, None), "at least one of them")


@dataclass(frozen=True)
class Dilated(Component):
    """Dilation: query i of batch element b sees key j only if ``(number[b, i] - j) % step[b, i] == 0``.

    Args:
        number: an integer tensor [batch, q_len], any strides, values of less than 2**62: the position of the query, or
            any other number.
        step: an integer tensor [batch, q_len], any strides, values of less than 2**62; its sign does not matter, and 0
            stands for 1.
    """

    NAME = "dilated"
    RELATION = CONGRUENT
    ROLES: ClassVar[Mapping[str, str]] = {"number": "number", "step": "step"}

    number: Operand
    step: Operand


COMPONENTS: dict[str, type[Component]] = {
    component.NAME: component for component in (Segments, Keys, Dense, Interval, HeadInterval, Dilated)
}
"""The kinds of components by name, in the order in which texts and operands list them."""
