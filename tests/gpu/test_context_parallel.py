"""Attention under context parallel on several GPUs: records, gradients beside double precision, and bits of 20 runs."""

from __future__ import annotations

import pytest
import torch

from ..passes.attention.test_context_parallel import check, facts_of

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus() -> None:
    check(facts_of("cuda", 2, 20, "two", "two turned", "two apart", "two in order"), 1e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")
def test_four_gpus() -> None:
    check(facts_of("cuda", 4, 20, "two", "two apart", "four", "four turned", "four in order"), 1e-2)
