"""Elements that lie far apart on a GPU: offsets hold 64 bits, and bits are those of near elements."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dash_inductor.kernels.common import mask_tables
from dash_inductor.kernels.common.mask_data import MaskData
from dash_inductor.model import Band, Mask, Plan, Site, Tiles
from dash_inductor.passes.ops.kernels.groups.launch import fill_behind
from dash_inductor.passes.ops.kernels.sums import launch
from dash_inductor.passes.ops.kernels.sums import one_hot_matmul as few
from dash_inductor.passes.ops.operators.unrolled_reductions import short_sum
from dash_inductor.planning import plan
from dash_inductor.records.records import all_records, clear_sites

from ..support import hopper_calls
from ..support.attention import Attention, compiled_backward
from ..support.calls import backward_spec, forward_spec, spec_of
from ..support.hopper import MARKS, plan_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

APART = (1 << 27) + 64
"""Elements from one index to the next, of which 17 need more than 32 bits."""


def apart(like: Tensor, dim: int, step: int = APART) -> Tensor:
    """A copy of a tensor of at most `step` elements for each index of a dimension, whose indices are that far apart."""
    if torch.cuda.get_device_properties(0).total_memory < 1.2 * step * like.shape[dim] * like.itemsize:
        pytest.skip("needs more memory")
    memory = torch.empty(step * like.shape[dim], dtype=like.dtype, device="cuda")
    rest = torch.empty(like.select(dim, 0).shape).stride()
    return memory.as_strided(like.shape, (*rest[:dim], step, *rest[dim:])).copy_(like)


@pytest.mark.parametrize("columns", [16, 32])
def test_sums_of_segments(columns: int) -> None:
    """Narrow rows are scanned, wide ones are scheduled."""
    values, rows = torch.randn(1, 4096, columns, device="cuda", dtype=torch.bfloat16), 100
    keys, order = torch.randint(0, rows, (4096,), device="cuda", dtype=torch.int32).sort(stable=True)
    found = launch.add_segments(None, apart(values, 2), keys, order, rows)
    assert torch.equal(found, launch.add_segments(None, values, keys, order, rows))


def test_compiled_sums_by_index() -> None:
    values, index = torch.randn(4096, 32, device="cuda", dtype=torch.bfloat16), torch.randint(0, 99, (4096,)).cuda()

    def program(values: Tensor, index: Tensor) -> Tensor:
        return torch.zeros(99, 32, dtype=values.dtype, device="cuda").index_add(0, index, values)

    clear_sites()
    torch._dynamo.reset()
    compiled = torch.compile(program, dynamic=False)
    assert torch.equal(compiled(apart(values, 1), index), compiled(values, index))
    assert {record.status for record in all_records() if record.rewrite == "index_sums"} == {"replaced"}


def test_sums_of_few_rows() -> None:
    values, rows = torch.randn(1, 4096, 32, device="cuda", dtype=torch.bfloat16), 10
    keys = torch.randint(0, rows, (4096,), device="cuda", dtype=torch.int32)
    found = few.add_few(None, apart(values, 2), keys, rows)
    assert torch.equal(found, few.add_few(None, values, keys, rows))


def test_few_rows_of_many_columns() -> None:
    """Rows and columns whose product needs more than 32 bits."""
    columns, rows = 1 << 27, 17
    values = torch.randn(1, 20, columns, device="cuda", dtype=torch.bfloat16)
    keys = torch.arange(20, device="cuda", dtype=torch.int32) % rows
    found = few.add_few(None, values, keys, rows)
    for row in (0, rows - 1):
        exact = values[0, keys == row].float().sum(0).bfloat16()
        assert torch.equal(found[0, row], exact)


def test_unrolled_reductions_and_rows_behind_groups() -> None:
    values = torch.randn(20, 3, 64, device="cuda")
    compiled = torch.compile(lambda x: short_sum(x, 1), dynamic=False)
    assert torch.equal(compiled(apart(values, 0)), compiled(values))
    out = torch.zeros(20, 64, device="cuda", dtype=torch.bfloat16)
    far, ends = apart(out, 0), torch.tensor([3, 18], device="cuda", dtype=torch.int32)
    fill_behind(far, ends, 0)
    assert far[18:].isnan().all()
    assert (far[:18] == 0).all()


@pytest.mark.parametrize("dim", [0, 2, 3])
def test_tables_of_a_dense_mask(dim: int) -> None:
    mask = Mask.parse("dense(0)")
    shown = torch.rand(18, 1, 200, 300, device="cuda") < 0.5
    far = apart(shown[..., :18] if dim == 3 else shown[:, :, :18] if dim == 2 else shown, dim)
    near = far.contiguous()
    sizes = near.shape[0], 1, 1, near.shape[2], near.shape[3]
    site = Site("cuda", "bfloat16", *sizes, 64, 64, replace(spec_of(Band(), 0.1), mask=mask))
    planned = plan(site, "sm_90")
    tables = [mask_tables.build(MaskData.of(mask, [dense], sizes), planned) for dense in (far, near)]
    for a, b in zip(*tables, strict=True):
        assert a.shape == b.shape
    assert torch.equal(tables[0].keys_seen, tables[1].keys_seen)


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_portable_attention(dim: int) -> None:
    """Through Inductor, with one operand far apart at a time."""
    mask = Band(0)
    p = Attention.random(20, 33, 32, mask, batch=17 if dim == 0 else 1, kv_heads=17 if dim == 1 else 1)
    out, lse = p.rounded_forward()
    two_pass = Plan("portable", "two_pass", "keep", Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2))
    one_pass = Plan("portable", "spt", "keep", Tiles(64, 64, 4, 2), None)
    for each in (two_pass, one_pass):
        torch._dynamo.reset()  # which compiles one function eight times at most
        compiled = compiled_backward(mask, p.scale, each)
        near = compiled(p.do, p.q, p.k, p.v, out, lse)
        for place in range(5):
            operands = [p.do, p.q, p.k, p.v, out]
            operands[place] = apart(operands[place], dim)
            found = compiled(*operands, lse)
            assert all(torch.equal(a, b) for a, b in zip(found, near, strict=True)), place


@MARKS[1]
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("place", range(5))
def test_hopper_attention(dim: int, place: int) -> None:
    """Queries, keys, values, the gradient or the output are far apart; TMA wants near columns."""
    mask = Band(0)
    p = Attention.random(200, 333, 64, mask, batch=17 if dim == 0 else 1, kv_heads=17 if dim == 1 else 1)
    if dim == 2:
        p = Attention.random(17, 33, 64, mask, batch=1, kv_heads=1)
    tensors = dict(zip("qkv", (p.q, p.k, p.v), strict=True)) | {"do": p.do}
    near = hopper_calls.forward(p.q, p.k, p.v, forward_spec(mask, p.scale))
    tensors["out"] = near[0]
    name = list(tensors)[place]
    far = tensors | {name: apart(tensors[name], dim)}
    found = hopper_calls.forward(far["q"], far["k"], far["v"], forward_spec(mask, p.scale))
    assert all(torch.equal(a, b) for a, b in zip(found, near, strict=True))
    spec, planned = backward_spec(mask, p.scale), plan_of(p, "spt")
    gradients, expected = (
        hopper_calls.backward(of["do"], of["q"], of["k"], of["v"], of["out"], near[1], spec, planned)
        for of in (far, tensors)
    )
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
