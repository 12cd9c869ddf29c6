"""The layout and the sources of the int32 vectors per token from which the table-driven kernels evaluate a mask.

Each relation of queries and keys has a form, its device encoding (`device.relations`), with vectors of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from ...model.components import Component
from ...model.relations import EQUAL
from ...model.traits import Traits
from .device.relations import forms_of

if TYPE_CHECKING:
    from .device.relations.form import Form, Vectors
    from .mask_data import MaskData


class Layout(NamedTuple):
    """Which of the per-token vectors of a mask belong to which form, as compile-time constants.

    Attributes:
        FORMS: the forms, which are the device encodings of the mask's relations; segment ids come first.
        Q_ROWS, KV_ROWS: for each form the index of its first vector among those of queries, and of keys.
        QUERIES, KEYS: the total number of vectors of queries and of keys.
    """

    FORMS: tuple[Form, ...]
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
            tuple(forms), q_rows, kv_rows, sum(form.queries for form in forms),
            sum(form.keys for form in forms),
        )  # fmt: skip

    @property
    def has_segment_ids(self) -> bool:
        """Whether the mask has segment ids; then they are the first form."""
        return self.FORMS[:1] == (_segment_ids(),)

    @property
    def has_ranges(self) -> bool:
        """Whether a form has ranges of positions (`Form.is_range`), which already respect the band and the lengths."""
        return any(form.is_range for form in self.FORMS)

    @property
    def reads_positions(self) -> bool:
        """Whether a form reads the positions of the keys instead of vectors for them."""
        return any(form.reads_positions for form in self.FORMS)


def layout(traits: Traits) -> Layout:
    """Returns the layout of the mask vectors that the kernels read in a call with these traits."""
    return Layout.of([form for form, _ in _forms(traits.kinds, traits.numbers)])


def _forms(kinds: Sequence[type[Component]], numbers: bool) -> list[tuple[Form, type[Component] | None]]:
    """Returns the forms of these kinds of components, in their order but segment ids first.

    A form without a kind (None) is segment ids that encode key validity alone.
    """
    found: list[tuple[Form, type[Component] | None]] = [
        (forms_of(kind.RELATION)[kind.OPTIONAL and not numbers], kind) for kind in kinds if kind.RELATION.queries
    ]
    found.sort(key=lambda of: of[0] is not _segment_ids())
    if any(kind.RELATION.is_of_keys for kind in kinds) and not (found and found[0][0] is _segment_ids()):
        found.insert(0, (_segment_ids(), None))
    return found


def _segment_ids() -> Form:
    return forms_of(EQUAL)[0]


def vectors(data: MaskData) -> list[Vectors]:
    """Returns, for each form of a mask, the tensors from which its per-token vectors are computed."""
    from .device.relations.form import Vectors

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
