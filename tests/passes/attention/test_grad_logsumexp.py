"""A gradient of the log-sum-exp in graphs: an operator that has one, in base 2, by an entry of the tests."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dash_inductor.frontends import all as frontends
from dash_inductor.graph.nodes import op_name
from dash_inductor.model.reasons import Reason
from dash_inductor.records.records import sites

from ...support.base_2 import Function, attend, attend_backward, exact, find
from ...support.graphs import BACKWARD, FORWARD, capture, op_counts, rewritten, tensors, trace

pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.fixture(autouse=True)
def the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontends, "FRONTENDS", (*frontends.FRONTENDS, find))


def loss(out: Tensor, lse: Tensor, which: str) -> Tensor:
    components = {"out": out.sin().sum(), "lse": lse.cos().sum()}
    return sum((component for name, component in components.items() if name in which), torch.zeros(()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("which", ["out", "lse", "out and lse"])
@pytest.mark.parametrize("whole", [False, True], ids=["graphs", "inductor"])
def test_gradients(which: str, dynamic: bool, dtype: torch.dtype, whole: bool) -> None:
    leaves = tensors(*[(2, 4, 40, 16)] * 3, dtype=dtype)
    with capture(strict=True) as graphs:
        make = torch.compile if whole else graphs.compile
        compiled = make(lambda q, k, v: Function.apply(q, k, v, True), dynamic=dynamic)
        out, lse = compiled(*leaves)
        found = torch.autograd.grad(loss(out, lse, which), leaves)
    (record,) = sites()
    assert (record.status, record.forward) == ("replaced", "reference")
    assert (graphs.count(FORWARD), graphs.count(BACKWARD)) == (1, 1)
    assert record.site is not None
    assert record.site.spec.grad_logsumexp is not None
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    true_out, true = exact(*doubles, True)
    expected = torch.autograd.grad(loss(true_out, true, which), doubles, allow_unused=True)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert (lse - true).abs().max() < 10 * tolerance
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - (0.0 if theirs is None else theirs)).abs().max() < tolerance


def joint(size: tuple[int, ...] = (2, 8, 128), dtype: torch.dtype = torch.float32):
    def model(q: Tensor, k: Tensor, v: Tensor, do: Tensor, grad_lse: Tensor) -> tuple[Tensor, ...]:
        out, lse = attend(q, k, v, True)
        return out, lse, *attend_backward(do, q, k, v, out, lse, grad_lse, True)

    def given() -> list[Tensor]:
        plane = [torch.empty(2, 8, 128, 64, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        return [*plane, torch.empty(size, dtype=dtype, device="cuda")]

    return trace(model, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_graph_on_an_h100(dtype: torch.dtype) -> None:
    """The forward's call has none, and the backward reads fp32."""
    graph, record = rewritten(joint(dtype=dtype))
    assert record.plan is not None
    assert (record.status, record.plan.kernel, record.forward) == ("replaced", "hopper", "hopper")
    assert (op_counts(graph)[FORWARD], op_counts(graph)[BACKWARD]) == (1, 1)
    forward, backward = (next(node for node in graph.nodes if op_name(node) == name) for name in (FORWARD, BACKWARD))
    assert "grad_logsumexp" not in forward.args[4]
    assert "/grad_logsumexp=0/" in backward.args[7]
    (gradient,) = backward.args[6]
    assert gradient.meta["val"].dtype == torch.float32


def test_a_call_with_a_gradient_of_another_size_is_not_replaced() -> None:
    _, record = rewritten(joint((2, 8, 128, 1)))
    assert (record.reason, record.detail) == (
        Reason.LAYOUT,
        "gradient of the log-sum-exp torch.float32 (2, 8, 128, 1)",
    )
