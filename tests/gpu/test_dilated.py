"""Dilated masks on Hopper kernels: tables, values, bits, and batch elements alone."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from dash_inductor.kernels.common.mask_data import MaskData
from dash_inductor.model import Mask

from ..support.table_words import dilation_of, values_of
from .test_another_component import BATCH, KV_HEADS, LENGTH, Q_HEADS, check_values_and_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
    ),
]

MASKS = [
    "dilated(0,1)",
    "causal & dilated(0,1)",
    "band(-3,200) & dilated(0,1)",
    "causal & segments(2,2) & dilated(0,1)",
]
STEPS = (1, 2, 3, 64, 100, 1000, None)


def operands(step: int | None) -> list[Tensor]:
    """Positions from -30 on with one step, or any numbers and steps; and documents."""
    ids = (torch.arange(LENGTH) // 300).expand(BATCH, -1).contiguous()
    if step is None:
        valid = torch.ones(BATCH, LENGTH, dtype=torch.bool)
        of = MaskData(Mask().band, BATCH, Q_HEADS, KV_HEADS, LENGTH, LENGTH, values_of(valid))
        return [t.contiguous().cuda() for t in (*dilation_of(random.Random(4), of), ids)]
    number = torch.arange(-30, LENGTH - 30, dtype=torch.int32).expand(BATCH, -1)
    return [t.contiguous().cuda() for t in (number, torch.full((BATCH, LENGTH), step), ids)]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("text", MASKS)
def test_values_and_bits(text: str, step: int | None, dim: int) -> None:
    # A query that sees one key alone has gradients of zero, and rounding errors of fp32 products.
    extras = operands(step)[: len(Mask.parse(text).operands)]
    check_values_and_bits(text, extras, dim, 10, least=1e-6)
