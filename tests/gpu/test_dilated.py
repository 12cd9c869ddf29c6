"""Dilated masks on Hopper kernels: tables, values, bits, and batch elements alone."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from dash_inductor.kernels.common import mask_tables
from dash_inductor.kernels.common.mask_data import MaskData
from dash_inductor.kernels.reference import tables as reference_tables
from dash_inductor.model import Call, Mask, Site
from dash_inductor.planning import plan

from ..support.repeats import differing_runs
from ..support.table_words import dilation_of, same_tables, values_of
from .test_another_component import BATCH, KV_HEADS, LENGTH, Q_HEADS, attend, exact

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
    torch.manual_seed(0)
    heads = Q_HEADS, KV_HEADS, KV_HEADS, Q_HEADS
    tensors = [torch.randn(BATCH, n, LENGTH, dim, device="cuda", dtype=torch.bfloat16) for n in heads]
    call = Call(Mask.parse(text), dim**-0.5)
    extras = operands(step)[: len(call.mask.operands)]
    site = Site("cuda", "bfloat16", BATCH, Q_HEADS, KV_HEADS, LENGTH, LENGTH, dim, dim, call)
    of = plan(site, "sm_90")
    assert of.kernel == of.forward == "hopper"
    data = MaskData.of(call.mask, extras, (BATCH, Q_HEADS, KV_HEADS, LENGTH, LENGTH))
    same_tables(mask_tables.build(data, of), reference_tables.build(data, of))
    found = attend(tensors, extras, call, of)
    for ours, true in zip(found, exact(tensors, reference_tables._shown(data)), strict=True):
        assert (ours.double() - true).norm() <= 8e-3 * true.norm()
    assert not differing_runs(lambda: attend(tensors, extras, call, of), 10)
    for b in range(BATCH):
        alone = attend([t[b : b + 1] for t in tensors], [t[b : b + 1] for t in extras], call, of)
        assert all(torch.equal(a, whole[b : b + 1]) for a, whole in zip(alone, found, strict=True))
