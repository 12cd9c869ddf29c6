"""Products of groups whose graphs run without fill: what nobody writes is NaN, and everything else is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dash_inductor.records.records import all_records, clear_sites

from ..support.repeats import bits, differing_runs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

ROWS, WIDTH, GROUPS = 4096, 512, 8


def offsets(last: int) -> Tensor:
    """Of groups of which two are empty, and the others begin at multiples of 16."""
    ends = torch.linspace(0, last, GROUPS, device="cuda") // 16 * 16
    ends[-2:] = last
    return ends.int()


def tensors(last: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(ROWS, WIDTH, device="cuda", generator=generator).bfloat16()
    weight = torch.randn(GROUPS, 1024, WIDTH, device="cuda", generator=generator).bfloat16()
    return x, weight, offsets(last)


def poisoned(run: Callable[[], list[Tensor]], value: float) -> list[Tensor]:
    """The results where all memory that the allocator has was filled with a value before."""
    run()
    blocks = [torch.full((1 << 24,), value, device="cuda") for _ in range(8)]
    blocks += [torch.full((1 << size,), value, device="cuda") for size in range(8, 24) for _ in range(4)]
    del blocks
    return run()


@pytest.mark.parametrize("last", [0, ROWS - 1008, ROWS])
@pytest.mark.parametrize("name", ["experts", "columns"])
def test_all_is_written(name: str, last: int) -> None:
    """Bits are those of PyTorch with its fill, also of gradients, and whatever lay in memory before."""
    x, weight, ends = tensors(last)

    def experts(x: Tensor, weight: Tensor) -> Tensor:
        return torch._grouped_mm(x, weight.mT, ends)

    def columns(x: Tensor, weight: Tensor) -> Tensor:
        return torch._grouped_mm(weight, x.t(), ends).t()

    function = {"experts": experts, "columns": columns}[name]

    def step(run: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
        out = run(*leaves)
        gradient = torch.arange(out.shape[1], device="cuda").bfloat16().expand(out.shape).contiguous()
        return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]

    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # of the module
    filled = step(function)
    compiled = torch.compile(function)
    assert filled[0][last:].isnan().all()
    assert not filled[2].isnan().any()  # groups without rows have gradients of zero
    for value in (3.0, float("inf")):
        for ours, theirs in zip(poisoned(lambda: step(compiled), value), filled, strict=True):
            assert torch.equal(bits(ours.nan_to_num(7)), bits(theirs.nan_to_num(7)))
            assert torch.equal(ours.isnan(), theirs.isnan())
    assert differing_runs(lambda: [tensor.nan_to_num(7) for tensor in step(compiled)], 20, load=True) == 0


def test_no_kernel_fills() -> None:
    """Nothing but the rows behind the last offset is written twice."""
    x, weight, ends = tensors(ROWS)
    compiled = torch.compile(lambda x, weight: torch._grouped_mm(x, weight.mT, ends).float().square().mean())

    def step() -> None:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
        torch.autograd.grad(compiled(*leaves), leaves)

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    assert any("fill_behind" in name for name in names)
    assert not any("FillFunctor<c10::BFloat16>" in name for name in names)


def test_sums_over_experts() -> None:
    """Gathered, weighted and summed in one kernel, whose additions are those of a loop."""
    rows = torch.randn(8192 * 8, WIDTH, device="cuda").bfloat16()
    places = torch.randperm(8192 * 8, device="cuda").view(8192, 8)

    def summed(rows: Tensor) -> Tensor:
        return (rows[places] * 0.5).sum(1)

    clear_sites()
    compiled = torch.compile(summed)
    found = compiled(rows)
    assert [record.rewrite for record in all_records()] == ["unrolled_reductions"]
    total = torch.zeros_like(found, dtype=torch.float32)
    for each in range(8):
        total += rows[places[:, each]].float() * 0.5
    assert torch.equal(found, total.bfloat16())
    assert differing_runs(lambda: [compiled(rows)], 20, load=True) == 0
