"""Device encodings of mask relations, one module per relation of `model.relations`, named after it.

Each module has `FORMS`, its `Form` and its `Form` if there are no key numbers.  A relation of pairs has none: kernels
read its elements, or bits (`schedule.table_tile_schedule`); `truth` is part of the segment ids of `equal`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from .....model.relations import Relation

if TYPE_CHECKING:
    from .form import Form


def forms_of(relation: Relation) -> tuple[Form, Form]:
    """Returns the form of a relation of queries and keys, and its form if there are no key numbers."""
    return cast("tuple[Form, Form]", import_module(f"{__name__}.{relation.name}").FORMS)
