"""A new entry is a file and a line: a library that nothing else knows is replaced, and refused for a reason."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor.config import config
from dash_inductor.errors import FallbackError
from dash_inductor.frontends import all as frontends
from dash_inductor.model.reasons import Reason
from dash_inductor.records.records import FORWARD_ONLY, clear_sites, sites

from ..support.graphs import BACKWARD, FORWARD, capture, step, tensors
from . import another_frontend
from .another_frontend import attend

pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.fixture(autouse=True)
def the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontends, "FRONTENDS", (*frontends.FRONTENDS, another_frontend.find))


def inputs() -> list[Tensor]:
    return tensors(*[(2, 4, 48, 16)] * 3)


def two_layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The operands of the second are results of the first, in the forward and in the backward."""
    _, first = attend(q, k, v, True)
    _, second = attend(first, k.sin(), first, False)
    return F.scaled_dot_product_attention(second, first, second)


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    second = F.scaled_dot_product_attention(first, k.sin(), first)
    return F.scaled_dot_product_attention(second, first, second)


def test_calls_are_replaced_beside_those_of_pytorch() -> None:
    with capture(strict=True) as graphs:
        results = step(graphs.compile(two_layers), inputs())
    assert [(record.op, record.mask) for record in sites()] == [
        (another_frontend.BACKWARD, "causal"),
        (another_frontend.BACKWARD, "full"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "full"),
    ]
    assert (graphs.count(FORWARD), graphs.count(BACKWARD)) == (3, 3)
    assert not graphs.count(another_frontend.FORWARD) + graphs.count(another_frontend.BACKWARD)
    true = step(exact, [t.detach().double().requires_grad_() for t in inputs()])
    assert all((ours - theirs).abs().max() < 1e-5 for ours, theirs in zip(results, true, strict=True))


def test_a_forward_that_stays() -> None:
    """The backward reads the library's log-sum-exp, and the numerics key names the library's operator."""
    with capture(forward="keep") as graphs:
        results = step(graphs.compile(lambda q, k, v: attend(q, k, v, True)[1]), inputs())
    (record,) = sites()
    assert record.forward == "not replaced: by the setting forward='keep'"
    assert record.plan is not None
    assert f"/forward=keep:{another_frontend.FORWARD}" in record.plan.numerics_key
    assert (graphs.count(another_frontend.FORWARD), graphs.count(BACKWARD)) == (1, 1)
    doubles = [t.detach().double().requires_grad_() for t in inputs()]
    true = step(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), doubles)
    assert all((ours - theirs).abs().max() < 1e-5 for ours, theirs in zip(results, true, strict=True))


def test_a_forward_alone() -> None:
    with capture(strict=True) as graphs, torch.no_grad():
        graphs.compile(lambda q, k, v: attend(q, k, v, True)[1])(*inputs())
    (record,) = sites()
    assert (record.op, record.kind, record.status) == (another_frontend.FORWARD, FORWARD_ONLY, "replaced")


def test_a_refusal_has_its_reason() -> None:
    def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, True, 30.0)[1]

    with capture() as graphs:
        step(graphs.compile(capped), inputs())
        (record,) = sites()
        assert (record.op, record.reason, record.detail) == (
            another_frontend.BACKWARD,
            Reason.UNSUPPORTED_OP,
            "a softcap",
        )
        assert record.shape == "q, k and v 2x4x48x16, float32"
    clear_sites()
    with capture(cpu="off", strict=True) as graphs:
        step(graphs.compile(capped), inputs())
    assert [record.reason for record in sites()] == [Reason.CPU_OFF]
    with capture(strict=True) as graphs, pytest.raises(FallbackError):
        step(graphs.compile(capped), inputs())
    assert not config.strict
