"""Cases of a test that are run always, and cases that are run when all tests are."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], soon: Collection[Any], argument: str = "case") -> Any:
    """Parametrises an argument: the cases in `soon` are run always, the others where all tests are."""
    params = [pytest.param(case, id=str(case), marks=[] if case in soon else pytest.mark.full) for case in cases]
    return pytest.mark.parametrize(argument, params)


def cases_of_this_run(request: pytest.FixtureRequest, modes: dict[str, str]) -> list[str]:
    """The cases of all tests of a module that are run now, each behind what its test is called in `modes`.

    Args:
        request: of a fixture of the module.
        modes: by name of a test; tests that are not in it, or have no ``case``, are left out.
    """
    items: list[Any] = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    return [
        f"{modes[item.originalname]},{item.callspec.params['case']}" for item in items if item.originalname in modes
    ]
