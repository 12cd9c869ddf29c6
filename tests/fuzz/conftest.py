"""All fuzzed programs run under deterministic algorithms."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def under_deterministic_algorithms(deterministic: None) -> None:
    """As the fixture says."""
