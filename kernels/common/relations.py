"""Device encodings of mask relations: the int32 vectors per token from which table-driven kernels evaluate them.

`device.relations` has the tests of each encoding (`Form`) in Triton, `hopper.shared.device.relations` the same in
Gluon.  Elementwise masks have no form: kernels read their elements, or bits (`schedule.table_walk`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...model.relations import BETWEEN, EQUAL
from ...model.terms import Term
from ...model.traits import Traits

if TYPE_CHECKING:
    from .mask_data import MaskData


class Form(NamedTuple):
    """A device encoding of a relation.

    Attributes:
        name: the name by which device code selects the test.
        queries, keys: the number of vectors that it reads per query and per key.
    """

    name: str
    queries: int
    keys: int


CODES = Form("codes", 1, 1)
"""Segment ids: a query sees the keys with its own code.  No query has the code -1, and no key the code -2.

Key validity is merged into the first codes of a mask: an invalid key has the code -1.
"""

SPANS = Form("spans", 2, 0)
"""Kv ranges: a query sees the keys at positions ``first <= position < end``, already clipped to band and length."""

RANKS = Form("ranks", 2, 1)
"""As `SPANS`, but compared with a number per key (its rank, at least 0) in place of its position."""

FORMS = {EQUAL.name: (CODES, CODES), BETWEEN.name: (RANKS, SPANS)}
"""For each relation its form, and its form if there are no key numbers."""


class Layout(NamedTuple):
    """The vectors of a mask, as compile-time constants.

    Attributes:
        FORMS: the names of the forms.
        Q_ROWS, KV_ROWS: for each form the index of its first vector among those of queries, and of keys.
        QUERIES, KEYS: the total number of vectors of queries and of keys.
    """

    FORMS: tuple[str, ...]
    Q_ROWS: tuple[int, ...]
    KV_ROWS: tuple[int, ...]
    QUERIES: int
    KEYS: int

    @staticmethod
    def of(forms: Sequence[Form]) -> Layout:
        q_rows, kv_rows = (
            tuple(sum(getattr(before, side) for before in forms[:i]) for i in range(len(forms)))
            for side in ("queries", "keys")
        )
        return Layout(
            tuple(form.name for form in forms), q_rows, kv_rows, sum(form.queries for form in forms),
            sum(form.keys for form in forms),
        )  # fmt: skip

    @property
    def has_codes(self) -> bool:
        """Whether the first form is `CODES`."""
        return CODES.name in self.FORMS[:1]

    @property
    def has_positions(self) -> bool:
        """Whether a form is `SPANS`, which already includes the band and the lengths of queries and keys."""
        return SPANS.name in self.FORMS


def layout(traits: Traits) -> Layout:
    """Returns the layout of the vectors that the kernels of a call read."""
    return Layout.of([form for form, _ in _forms(traits.kinds, traits.numbers)])


def _forms(kinds: Sequence[type[Term]], numbers: bool) -> list[tuple[Form, type[Term] | None]]:
    """Returns the forms of these kinds of terms, in their order but codes first.

    A form without a kind (None) is codes that encode key validity alone.
    """
    found: list[tuple[Form, type[Term] | None]] = [
        (FORMS[kind.RELATION.name][kind.OPTIONAL and not numbers], kind) for kind in kinds if kind.RELATION.queries
    ]
    found.sort(key=lambda of: of[0] != CODES)
    if any(kind.RELATION.is_of_keys for kind in kinds) and not (found and found[0][0] == CODES):
        found.insert(0, (CODES, None))
    return found


@dataclass(frozen=True)
class Vectors:
    """The tensors from which the vectors of a form are computed.

    Args:
        values: the operands of a term by role, without absent ones.
        valid: for codes, [batch, kv_len]: nonzero for valid keys.
    """

    form: Form
    values: Mapping[str, Tensor]
    valid: Tensor | None = None


def vectors(data: MaskData) -> list[Vectors]:
    """Returns the sources of the vectors of a mask, one per form."""
    kinds = {kind: {kind.ROLES[name]: value for name, value in values.items()} for kind, values in data.values}
    numbers = any(kind.OPTIONAL and not {*kind.RELATION.keys}.isdisjoint(kinds[kind]) for kind in kinds)
    valid: Tensor | None = None
    for kind, values in kinds.items():
        if kind.RELATION.is_of_keys:
            (of_keys,) = values.values()
            valid = of_keys if valid is None else (valid != 0) & (of_keys != 0)
    found = [Vectors(form, {} if kind is None else kinds[kind]) for form, kind in _forms([*kinds], numbers)]
    if valid is not None:
        found[0] = Vectors(found[0].form, found[0].values, valid)
    return found


def computed(of: Vectors, data: MaskData) -> tuple[Tensor, Tensor]:
    """Computes with PyTorch the vectors of a form other than `CODES`: int32 [batch, vectors, tokens] of queries and
    keys.
    """
    return spans(of, data)


def spans(of: Vectors, data: MaskData) -> tuple[Tensor, Tensor]:
    """Computes the vectors of `SPANS` or `RANKS`: int32 [batch, 2, q_len], and int32 [batch, 0 or 1, kv_len]."""
    lo, hi, number = (t if t is None else t.long() for t in map(of.values.get, ("least", "most", "number")))
    if of.form == SPANS:
        band, queries = data.band.resolve(data.q_len, data.kv_len), torch.arange(data.q_len, device=data.device)
        first = torch.zeros(data.batch, data.q_len, dtype=torch.int64, device=data.device) if lo is None else lo
        end = torch.full_like(first, data.kv_len) if hi is None else hi.clamp(max=data.kv_len) + 1
        if band.hi is not None:
            first = torch.maximum(first, queries - band.hi)
        if band.lo is not None:
            end = torch.minimum(end, queries - band.lo + 1)
        limits = first.clamp(0, data.kv_len), end.clamp(0, data.kv_len)
        none = torch.empty(data.batch, 0, data.kv_len, dtype=torch.int32, device=data.device)
        return torch.stack(limits, 1).to(torch.int32), none
    if number is None:
        number = torch.arange(data.kv_len, device=data.device).expand(data.batch, -1).contiguous()
    # Only the order of the numbers matters, so each is replaced by its index among the sorted numbers.
    ordered = number.sort(1).values
    ranks = torch.searchsorted(ordered, number)
    first = torch.zeros(data.batch, data.q_len, dtype=torch.int64, device=data.device)
    end = torch.full_like(first, data.kv_len)
    if lo is not None:
        first = torch.searchsorted(ordered, lo.contiguous())
    if hi is not None:
        end = torch.searchsorted(ordered, hi.contiguous(), right=True)
    return torch.stack((first, end), 1).to(torch.int32), ranks[:, None].to(torch.int32)
