"""What the guard sees of operators and gradients in programs with unusual tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from dash_guard.checks import same_rank_recompute
from dash_guard.recompute.operators import OperatorLog


def test_parameters_of_all_kinds_are_seen_and_computed_with() -> None:
    class Scale(nn.Parameter):
        pass

    scale = Scale(torch.tensor([2.0, 3.0]))
    with OperatorLog() as log:
        result = scale * torch.ones(2)
    assert result.tolist() == [2.0, 3.0]
    assert any(operator.name.startswith("mul") for operator in log.operators)


def test_lazy_parameters_are_made() -> None:
    layer = nn.LazyLinear(3)
    with OperatorLog():
        result = layer(torch.ones(2, 5))
    assert result.shape == (2, 3)


def test_a_result_that_the_loss_does_not_use_has_no_gradient() -> None:
    """The backward of compiled code gives None to the hooks of such a result."""
    layer = nn.Linear(4, 4)
    compiled = torch.compile(lambda x: ((y := layer(x)).square().mean(), y * 2), backend="aot_eager")
    batch: Any = SimpleNamespace(gradients={})
    loss, unused = compiled(torch.randn(2, 4))
    for number, tensor in enumerate((loss, unused)):
        tensor.register_hook(lambda gradient, number=number: same_rank_recompute._keep(batch, number, gradient))
    loss.backward()
    assert list(batch.gradients) == [0]
