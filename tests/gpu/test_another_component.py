"""A new component over a relation that there is, beside an interval and segments, on Hopper kernels: two kv ranges and
segment ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dash_inductor.kernels.common import mask_tables
from dash_inductor.kernels.common.mask_data import MaskData
from dash_inductor.kernels.hopper.backward.data import BackwardData
from dash_inductor.kernels.hopper.forward.data import ForwardData
from dash_inductor.kernels.reference import tables as reference_tables
from dash_inductor.model import AttentionSpec, Mask, Plan, Site
from dash_inductor.planning import plan

from ..interpreted.another_component import installed
from ..support import hopper_calls
from ..support.repeats import differing_runs
from ..support.table_words import same_tables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
    ),
]

MASKS = ["causal & at_least(0,1)", "causal & segments(2,3) & interval(4,none,none) & at_least(0,1)"]
BATCH, Q_HEADS, KV_HEADS, LENGTH = 2, 4, 2, 700
ORDER = (0, 1, 2, 3)


@pytest.fixture(autouse=True)
def component() -> Iterator[None]:
    with installed():
        yield


def operands() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, kv = (torch.randint(0, 9, (BATCH, LENGTH), generator=generator) for _ in range(2))
    ids = (torch.arange(LENGTH) // 300).expand(BATCH, -1).contiguous()
    starts = torch.arange(LENGTH).expand(BATCH, -1) - 200
    return [t.cuda() for t in (q, kv, ids, ids, starts.contiguous())]


def attend(tensors: list[Tensor], extras: list[Tensor], spec: AttentionSpec, of: Plan) -> list[Tensor]:
    q, k, v, do = tensors
    data = MaskData.of(spec.mask, extras, (len(q), Q_HEADS, KV_HEADS, LENGTH, LENGTH))
    made = mask_tables.build(data, of)
    both = *(side if side.numel() else None for side in (made.q_vectors, made.kv_vectors)), made.keys_seen
    out, lse = hopper_calls.forward(
        q, k, v, replace(spec, orders=(ORDER,)), ForwardData(*both, made.counts, made.row_steps)
    )
    tile_schedules = made.visits, made.steps, made.contributions
    found = hopper_calls.backward(
        do, q, k, v, out, lse, replace(spec, orders=(ORDER,) * 3), of, BackwardData(*both, *tile_schedules)
    )
    return [out, *found]


def exact(tensors: list[Tensor], keep: Tensor) -> list[Tensor]:
    q, k, v, do = (t.double() for t in tensors)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    k_, v_ = (t.repeat_interleave(Q_HEADS // KV_HEADS, 1) for t in leaves[1:])
    p = torch.where(keep, (q @ k_.mT) * q.shape[-1] ** -0.5, float("-inf")).softmax(-1)
    out = torch.where(keep.any(-1, keepdim=True), p.nan_to_num(0.0), 0.0) @ v_
    return [out.detach(), *torch.autograd.grad(out, leaves, do)]


def check_values_and_bits(text: str, extras: list[Tensor], dim: int, repeats: int, least: float = 0.0) -> None:
    """Compares tables, values with double precision, bits of repeated calls, and batch elements alone.

    Args:
        repeats: how often a call is repeated.
        least: the allowed error that does not shrink with a result, as a share of the output's gradient.
    """
    torch.manual_seed(0)
    heads = Q_HEADS, KV_HEADS, KV_HEADS, Q_HEADS
    tensors = [torch.randn(BATCH, n, LENGTH, dim, device="cuda", dtype=torch.bfloat16) for n in heads]
    spec = AttentionSpec(Mask.parse(text), dim**-0.5)
    site = Site("cuda", "bfloat16", BATCH, Q_HEADS, KV_HEADS, LENGTH, LENGTH, dim, dim, spec)
    of = plan(site, "sm_90")
    assert of.kernel == of.forward == "hopper"
    data = MaskData.of(spec.mask, extras, (BATCH, Q_HEADS, KV_HEADS, LENGTH, LENGTH))
    same_tables(mask_tables.build(data, of), reference_tables.build(data, of))
    found = attend(tensors, extras, spec, of)
    for ours, true in zip(found, exact(tensors, reference_tables._shown(data)), strict=True):
        assert (ours.double() - true).norm() <= 8e-3 * true.norm() + least * tensors[3].norm()
    assert not differing_runs(lambda: attend(tensors, extras, spec, of), repeats)
    for b in range(BATCH):
        alone = attend([t[b : b + 1] for t in tensors], [t[b : b + 1] for t in extras], spec, of)
        assert all(torch.equal(a, whole[b : b + 1]) for a, whole in zip(alone, found, strict=True))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("text", MASKS)
def test_values_and_bits(text: str, dim: int) -> None:
    check_values_and_bits(text, operands(), dim, 20)
