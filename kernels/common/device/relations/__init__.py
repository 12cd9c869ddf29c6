"""Device encodings of mask relations, one module per relation of `model.relations`, named after it.

Each module has `FORMS`, two `Form`s: the usual one, and the one for masks whose keys have no numbers of their own,
only positions.  A relation of pairs (an elementwise mask) has none: kernels read its elements, or bits
(`schedule.table_tile_schedule`); key validity, `truth`, is part of the segment ids of `equal`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from .....model.relations import Relation

if TYPE_CHECKING:
    from .form import Form


def forms_of(relation: Relation) -> tuple[Form, Form]:
    """Returns a relation's two device encodings: the usual one, and one for masks in which keys have only positions."""
    return cast("tuple[Form, Form]", import_module(f"{__name__}.{relation.name}").FORMS)
