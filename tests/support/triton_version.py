"""Facts that tests of compiled kernels take from the version of Triton."""

from __future__ import annotations

import pytest
import triton

from dash_inductor.upstream import compat

TRITON = tuple(map(int, triton.__version__.split(".")[:2]))

PINNED = pytest.mark.skipif(TRITON != (3, 7), reason="pinned with Triton 3.7")
"""The mark of a test of exact registers, spills and lengths, which every version of Triton changes."""

DESCRIPTORS_LIVE_THROUGH_THE_LOOP = compat.keeps_descriptors()
"""Whether the descriptors of a matmul's operands are computed before a loop, one for each slice."""

UNTUNED = pytest.mark.skipif(
    DESCRIPTORS_LIVE_THROUGH_THE_LOOP, reason="with Triton 3.9 the forwards of masks that are data spill in their steps"
)
