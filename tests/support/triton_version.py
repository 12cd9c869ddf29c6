"""Facts that tests of compiled kernels take from the version of Triton."""

from __future__ import annotations

import pytest
import triton

TRITON = tuple(map(int, triton.__version__.split(".")[:2]))

PINNED = pytest.mark.skipif(TRITON != (3, 7), reason="pinned with Triton 3.7")
"""The mark of a test of exact registers, spills and lengths, which every version of Triton changes."""
