"""Readers of components that compare queries with keys, one module per kind of component, named after it.

Each module has ``split(scores, visible, loads, of_data, of_positions)``, which splits off the component from a mask's
visibility: it returns the rest of the visibility, and the component or None if there is none.  `of_data` says whether
the mask depends on data, `of_positions` whether the component may depend on positions alone, and on heads.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import cast

from ...model.components import COMPONENTS
from ..bands import Scores
from ..found import FoundComponent
from ..index_expr import Value
from ..token_data import Loads

Split = Callable[[Scores, Value, Loads, bool, bool], tuple[Value, FoundComponent | None]]

_NAMES = {module.name for module in iter_modules(__path__)}

SPLITS = [cast(Split, import_module(f"{__name__}.{name}").split) for name in COMPONENTS if name in _NAMES]
"""The readers in the order of `COMPONENTS`."""
