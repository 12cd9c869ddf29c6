"""Sums of few rows that become additions: which, and their values beside double precision."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dash_inductor.passes.ops import unrolled_reductions
from dash_inductor.passes.ops.operators.unrolled_reductions import short_sum
from dash_inductor.records.records import all_records, clear_sites

from ...support.graphs import capture

pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(unrolled_reductions, "DEVICES", ("cpu",))
    monkeypatch.setattr(unrolled_reductions, "LEAST", 1)
    torch._dynamo.reset()
    clear_sites()
    yield
    torch._dynamo.reset()


def rewritten() -> int:
    return sum(record.rewrite == "unrolled_reductions" and record.status == "replaced" for record in all_records())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_values(dtype: torch.dtype) -> None:
    """Of code that Inductor generates, with a dimension kept or not, and of gradients, one a sum over 12."""
    x, weight = (torch.randn(12, count, width).to(dtype) for count, width in ((8, 40), (8, 1)))

    def function(x: Tensor, weight: Tensor) -> Tensor:
        rows = (x * weight).sum(1)
        return rows + (x.transpose(0, 1) * 2).sum(0, keepdim=True).squeeze(0) + x[:3].repeat(1, 2, 1).sum(1)[0]

    def step(run: object, *tensors: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        out = run(*leaves)  # type: ignore[operator]
        return [out.detach(), *torch.autograd.grad(out.double().square().sum(), leaves)]

    exact = step(function, x.double(), weight.double())
    for dynamic in (False, True):
        torch._dynamo.reset()
        clear_sites()
        found = step(torch.compile(function, dynamic=dynamic), x, weight)
        assert rewritten() == (0 if dynamic else 4)
        for ours, true in zip(found, exact, strict=True):
            assert (ours.double() - true).norm() <= 4 * torch.finfo(dtype).eps * true.norm()


def test_a_dynamic_length() -> None:
    x = torch.randn(12, 8, 40)
    torch._dynamo.mark_dynamic(x, 0)
    assert torch.equal(torch.compile(lambda x: x.sum(1))(x), short_sum(x, 1))
    assert rewritten() == 1


def test_what_stays() -> None:
    """Others are as fast with a reduction, or Inductor's own additions."""
    programs = [
        lambda x: x[:, :7].sum(1),
        lambda x: x.sum(2),
        lambda x: x[..., :8].sum(1),
        lambda x: x.repeat(1, 3, 1).sum(1),
        lambda x: x.sum((0, 1)),
        lambda x: x.long().sum(1),
        lambda x: x.bfloat16().sum(1, dtype=torch.float32),
    ]
    for program in programs:
        with capture() as graphs:
            graphs.compile(program)(torch.randn(12, 8, 40))
    assert rewritten() == 0
