"""Every reason for a fallback, what `strict` makes of it, and what happens when our own code fails."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_inductor.config import config
from dash_inductor.errors import ArgumentError, FallbackError
from dash_inductor.graph import emit
from dash_inductor.model.reasons import Reason
from dash_inductor.passes.attention import sites as sites_module
from dash_inductor.planning import planner
from dash_inductor.records.records import sites

from ...support.graphs import (
    Shape,
    causal_bias,
    cuda_inputs,
    efficient,
    flash,
    flash_backward,
    joint_graph,
    rewrite_on,
    rewritten,
    trace,
)

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("deterministic")


def varlen(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Any, ...]:
    q, k, v, do = (t.transpose(1, 2).reshape(-1, 8, 64) for t in (q, k, v, do))
    cu, other = (torch.full((3,), start, dtype=torch.int32, device="cuda") for start in (0, 1))
    out, lse, seed, unused, _ = aten._flash_attention_forward(q, k, v, cu, other, 128, 128, 0.0, True, False)
    return aten._flash_attention_backward(do, q, k, v, out, lse, cu, other, 128, 128, 0.0, True, seed, unused)[:3]


def dilated_bias(low: float = -1.0) -> Tensor:
    """Every second key from the query on; the others count less."""
    position = torch.arange(128, device="cuda")
    zero, other = (torch.full((), x, dtype=torch.bfloat16, device="cuda") for x in (0.0, low))
    return torch.where((position.unsqueeze(0) - position.unsqueeze(1)) % 2 == 0, zero, other)


LARGE = {"head_dim": 256, "value_dim": 256}


@pytest.mark.parametrize(
    ("reason", "maker", "shape", "options"),
    [
        (Reason.DROPOUT, flash, {}, {"dropout": 1.0}),
        (Reason.DTYPE, flash_backward, {"dtype": torch.float64}, {}),
        (Reason.HEAD_DIM, efficient, {"head_dim": 520, "value_dim": 520}, {}),
        (Reason.HEAD_DIM, efficient, {"head_dim": 136, "value_dim": 136, "dtype": torch.float32}, {}),
        (Reason.VALUE_DIM, efficient, {"value_dim": 520}, {}),
        (Reason.VALUE_DIM, efficient, {"head_dim": 192, "value_dim": 128, "dtype": torch.float32}, {}),
        (Reason.SHAPE, flash_backward, {"kv_heads": 3}, {}),
        (Reason.CAUSAL_LENGTHS, flash, {"q_len": 64}, {}),
        (Reason.LAYOUT, flash_backward, {}, {"lse": (8, 256)}),
        (Reason.VARLEN, varlen, {}, {}),
    ],
)
def test_reasons(reason, maker, shape, options) -> None:
    module = joint_graph(maker, Shape(**shape), **options)
    text = str(module.graph)
    graph, record = rewritten(module)
    assert (record.status, record.reason) == ("fallback", reason)
    assert str(graph) == text


def test_large_head_dims_read_every_mask() -> None:
    """A bias that hides pairs which no band hides is read as a mask."""
    options = {"bias": lambda: dilated_bias(-math.inf)}
    _, record = rewritten(joint_graph(efficient, Shape(**LARGE), **options))
    assert (record.status, record.mask, record.plan.kernel) == ("replaced", "dilated(0,1)", "hopper")


@pytest.mark.parametrize("shape", [LARGE, {"head_dim": 192, "value_dim": 128}, {"value_dim": 128}], ids=str)
@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("bias_gradient", {"bias": lambda: causal_bias(128), "bias_grad": True}),
        ("mask_not_a_band", {"bias": dilated_bias}),
    ],
    ids=["gradient", "dilated"],
)
def test_large_head_dims_read_every_bias(reason: str, options: dict[str, Any], shape: dict[str, int]) -> None:
    """Why a mask is a bias is in the detail of the record."""
    _, record = rewritten(joint_graph(efficient, Shape(**shape), **options))
    assert (record.status, record.mask, record.plan.kernel) == ("replaced", "full + bias", "portable")
    assert record.detail.startswith(f"the mask is added as a bias: {reason}")


def test_other_devices() -> None:
    def on_meta() -> list[Tensor]:
        return [t.to("meta") for t in cuda_inputs(Shape())]

    def backward(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Any, ...]:
        lse, rng = torch.empty(2, 8, 128, device="meta"), torch.empty(2, dtype=torch.uint64, device="meta")
        return aten._scaled_dot_product_flash_attention_backward(
            do, q, k, v, do, lse, None, None, 128, 128, 0.0, True, rng, rng
        )

    _, record = rewritten(trace(backward, on_meta))
    assert (record.reason, record.detail) == (Reason.DEVICE, "meta")


@pytest.mark.parametrize(
    ("kernel", "dims"),
    [("hopper", (256, 256)), ("hopper", (192, 128)), ("portable", (136, 136)), ("portable", (64, 128))],
)
def test_large_head_dims(kernel: str, dims: tuple[int, int]) -> None:
    capability = (10, 0) if dims == (136, 136) else (9, 0)
    _, record = rewritten(joint_graph(efficient, Shape(head_dim=dims[0], value_dim=dims[1])), capability=capability)
    assert record.reason is None
    assert record.plan is not None
    assert record.plan.kernel == kernel


def test_architecture_without_a_plan() -> None:
    _, record = rewritten(joint_graph(flash), capability=(7, 0))
    assert record.reason is Reason.SCHEDULE_UNSUPPORTED
    assert "sm_70" in record.detail
    assert record.site is not None


def test_flex_attention_is_not_replaced() -> None:
    """A call with other arguments than are known."""
    graph = joint_graph(flash).graph
    query = next(iter(graph.nodes))
    with graph.inserting_before(graph.output_node()):
        node = graph.call_function(torch.ops.higher_order.flex_attention_backward, (query,))
    rewrite_on(graph)
    assert {r.name: r.reason for r in sites()}[node.name] is Reason.FLEX_ATTENTION


def test_every_reason_has_one_sentence() -> None:
    for reason in Reason:
        assert re.fullmatch(r"[A-Z][^\n]*\.", reason.explanation), reason
        assert Reason(reason.value) is reason


def test_strict_names_reason_and_source() -> None:
    module = joint_graph(flash, dropout=1.0)
    for node in module.graph.nodes:
        node.meta["stack_trace"] = '  File "/home/me/model.py", line 12, in forward\n    attend(q)\n'
    with config.patch(strict=True), pytest.raises(FallbackError, match=r"dropout: .*at /home/me/model\.py:12"):
        rewrite_on(module.graph)
    assert [r.reason for r in sites()] == [Reason.DROPOUT]


def test_strict_accepts_replaced_sites_and_cpu_sites_that_are_off() -> None:
    def on_cpu(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Any, ...]:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(do, q, k, v, out, lse, 0.0, False)

    cpu = trace(on_cpu, lambda: [torch.empty(2, 4, 32, 16) for _ in range(4)])
    with config.patch(strict=True):
        rewrite_on(joint_graph(flash).graph)
        rewrite_on(cpu.graph)
    assert [r.reason for r in sites()] == [None, Reason.CPU_OFF]


@pytest.mark.parametrize("stage", ["reading", "replacing"])
def test_unexpected_errors_keep_the_site_and_warn(stage, monkeypatch, caplog) -> None:
    module = joint_graph(efficient, bias=lambda: causal_bias(128))
    text = str(module.graph)
    if stage == "reading":
        monkeypatch.setattr(sites_module, "decide", lambda *args, **kwargs: 1 / 0)
    else:
        original = emit.Emitter.call

        def call_then_fail(self: emit.Emitter, target: Any, *args: Any, **kwargs: Any) -> Any:
            node = original(self, target, *args, **kwargs)
            if target is torch.ops.dash_inductor.attention_backward.default:
                raise ZeroDivisionError("division by zero")
            return node

        monkeypatch.setattr(emit.Emitter, "call", call_then_fail)
    graph, record = rewritten(module)
    assert str(graph) == text
    assert record.reason is Reason.INTERNAL_ERROR
    assert record.detail.startswith("ZeroDivisionError: division by zero at ")
    assert [(r.levelname, r.name) for r in caplog.records if r.name == "dash_inductor"] == [
        ("WARNING", "dash_inductor")
    ]
    again = joint_graph(efficient, bias=lambda: causal_bias(128))
    with config.patch(strict=True), pytest.raises(FallbackError, match="internal_error"):
        rewrite_on(again.graph)


def test_planner_errors_are_reasons_not_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise ArgumentError("mask", "x", "something else")

    monkeypatch.setattr(planner, "plan", refuse)
    _, record = rewritten(joint_graph(flash))
    assert (record.reason, record.detail) == (
        Reason.SCHEDULE_UNSUPPORTED,
        "mask='x' is not allowed: expected something else",
    )
