"""Kernels that a step has not: fills of memory, and masks that are false everywhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dash_inductor.config import config
from dash_inductor.records.records import all_records, clear_sites

from ..support import bags
from ..support.repeats import bits, differing_runs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

Step = Callable[[], list[Tensor]]


def filled(step: Step) -> int:
    """Kernels that fill memory in a step."""
    step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    return sum(event.count for event in profiled.key_averages() if "FillFunctor" in event.key)


def logits_beside_the_loss(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = F.linear(x.tanh(), weight)
    return F.cross_entropy(logits.float(), labels), logits, logits.argmax(1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_zeros_for_results_without_a_gradient(dynamic: bool) -> None:
    """One kernel makes zeros, and one the gradient of the loss; PyTorch fills both with NaN first."""
    torch.manual_seed(0)
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(8192, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, 8192, (512,), device="cuda")

    def step_of(run: Callable[..., tuple[Tensor, ...]]) -> Step:
        def step() -> list[Tensor]:
            loss, logits, _ = run(x, weight, labels)
            return [loss.detach(), logits.detach(), *torch.autograd.grad(loss, [x, weight])]

        return step

    found, counts = {}, {}
    for fill in (True, False):
        torch._dynamo.reset()
        with config.patch(fill_uninitialized_memory=fill):
            step = step_of(torch.compile(logits_beside_the_loss, dynamic=dynamic))
            counts[fill], found[fill] = filled(step), step()
    assert all(map(torch.equal, map(bits, found[True]), map(bits, found[False])))
    assert counts[True] - counts[False] >= 1
    assert counts[False] <= 3


def test_bags_write_all_that_they_return() -> None:
    """But for the size of a last bag that is none: fills are seen."""
    assert [name for name, results in bags.calls("cuda") if any(bags.unwritten(results))] == []
    weight, indices = torch.randn(8, 4, device="cuda"), torch.arange(8, device="cuda")
    ends = torch.tensor([0, 3, 8], device="cuda")
    found = torch.ops.aten._embedding_bag(weight, indices, ends, include_last_offset=True)
    assert bags.unwritten(found) == [False, False, True, False]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_are_not_filled(mode: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(1000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    indices = torch.randint(0, 1000, (4096,), device="cuda")
    starts = torch.arange(0, 4096, 16, device="cuda")

    def bag(weight: Tensor, indices: Tensor, starts: Tensor) -> Tensor:
        return F.embedding_bag(indices, weight, starts, mode=mode).sin()

    found, counts = {}, {}
    for fill in (True, False):
        torch._dynamo.reset()
        with config.patch(fill_uninitialized_memory=fill):
            run = torch.compile(bag, dynamic=dynamic)

            def step() -> list[Tensor]:
                out = run(weight, indices, starts)  # noqa: B023
                return [out.detach(), *torch.autograd.grad(out.float().square().sum(), [weight])]

            counts[fill], found[fill] = filled(step), step()
            assert differing_runs(step, 20, poisoned=True) == 0
    assert all(map(torch.equal, map(bits, found[True]), map(bits, found[False])))
    assert counts[True] - counts[False] >= 10


def experts(x: Tensor, scores: Tensor, weight: Tensor) -> Tensor:
    numbers, order = scores.topk(2, -1).indices.reshape(-1).sort(stable=True)
    ends = torch.histc(numbers.int().float(), weight.shape[0], 0, weight.shape[0] - 1).cumsum(0).int()
    absent = (numbers >= weight.shape[0]).unsqueeze(-1)
    rows = torch._grouped_mm(x[order // 2].masked_fill(absent, 0.0), weight, ends).masked_fill(absent, 0.0)
    return torch.zeros_like(rows).index_put((order,), rows).view(len(x), 2, -1).sum(1)


def test_masks_of_experts() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(8, 128, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    scores = torch.randn(256, 8, device="cuda")

    def step(run: Callable[..., Tensor]) -> list[Tensor]:
        out = run(x, scores, weight)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), [x, weight])]

    clear_sites()
    torch._dynamo.reset()
    found = step(torch.compile(experts))
    masks = [record for record in all_records() if getattr(record, "rewrite", "") == "known_masks"]
    assert len(masks) >= 2
    torch.use_deterministic_algorithms(False)  # under which `histc` raises, if it is PyTorch's; nothing is rewritten
    torch._dynamo.reset()
    clear_sites()
    plain = step(torch.compile(experts))
    assert not all_records()
    for ours, theirs in zip(found, plain, strict=True):
        assert (ours.float() - theirs.float()).norm() <= 1e-2 * theirs.float().norm()
