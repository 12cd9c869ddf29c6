"""The benchmark of single sites on a GPU: attention is replaced, and its bits are always the same."""

from __future__ import annotations

import pytest

from benchmarks import site

pytestmark = pytest.mark.gpu


def test_sites_on_a_gpu() -> None:
    assert site.main([]) == 0
