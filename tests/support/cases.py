"""Cases of a test that are run always, and those that are run where all tests are."""

from __future__ import annotations

from typing import Any

import pytest


def some(cases: list[str], number: int) -> Any:
    """Parametrises ``case``: the first so many cases are run always, the others where all tests are."""
    params = [pytest.param(case, marks=[pytest.mark.full] if i >= number else []) for i, case in enumerate(cases)]
    return pytest.mark.parametrize("case", params)


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
