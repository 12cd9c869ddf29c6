"""Sites of the CUDA operators on fake tensors: what is read from a node, every reason to keep one, and failures."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph, GraphModule

import dash_inductor
from dash_inductor.config import config
from dash_inductor.errors import ArgumentError, SiteKeptError
from dash_inductor.matching import attention_ops, emit, layout, rewrite
from dash_inductor.matching import sites as sites_module
from dash_inductor.matching.rewrite import rewrite_graph
from dash_inductor.matching.sites import Kept, intersect
from dash_inductor.observe.reasons import Reason
from dash_inductor.observe.records import SiteRecord, sites
from dash_inductor.schedule.problem import Band, Site

from .support.graphs import (
    BACKWARD,
    FORWARD,
    Shape,
    causal_bias,
    cuda_inputs,
    cudnn,
    efficient,
    flash,
    joint_graph,
    op_counts,
    planes,
    trace,
)

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch, deterministic: None) -> None:
    """The fake CUDA device is an H100."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def rewritten(module: GraphModule) -> tuple[Graph, SiteRecord]:
    rewrite_graph(module.graph)
    module.graph.lint()
    (record,) = sites()
    return module.graph, record


def outputs(graph: Graph) -> list[tuple[Any, ...]]:
    return [
        (n.meta["val"].shape, n.meta["val"].stride(), n.meta["val"].dtype) for n in graph.output_node().all_input_nodes
    ]


def call(graph: Graph, op: str) -> dict[str, Any]:
    """The arguments of the only call of an operator."""
    (node,) = (n for n in graph.nodes if attention_ops.op_name(n) == op)
    return attention_ops.bind(node)


# ---- what is replaced ----


@pytest.mark.parametrize("layout_name", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    ("maker", "options", "mask", "scale"),
    [
        (flash, {"causal": True}, "causal", 0.125),
        (flash, {"causal": False}, "full", 0.125),
        (efficient, {"causal": True}, "causal", 64**-0.5),
        (efficient, {"bias": lambda: causal_bias(101)}, "causal", 64**-0.5),
        (efficient, {"bias": lambda: causal_bias(101), "causal": True}, "causal", 64**-0.5),
        (cudnn, {"causal": False}, "full", 64**-0.5),
    ],
)
def test_cuda_operators_are_replaced(maker, options, mask, scale, layout_name) -> None:
    shape = Shape(q_len=101, kv_len=101, layout=layout_name)
    module = joint_graph(maker, shape, **options)
    before = outputs(module.graph)
    graph, record = rewritten(module)
    assert op_counts(graph)[FORWARD] == op_counts(graph)[BACKWARD] == 1
    assert not [op for op in op_counts(graph) if "attention" in op and not op.startswith("dash::")]
    assert planes(graph, 101) == []
    assert outputs(graph) == before
    forward, backward = call(graph, FORWARD), call(graph, BACKWARD)
    for arguments in (forward, backward):
        assert (arguments["mask"], arguments["scale"]) == (mask, scale)
        assert arguments["site"] == record.name
        assert arguments["plan"] == str(record.plan)
    assert backward["logsumexp"].meta["val"].shape == (2, 8, 101)
    assert record.site == Site("cuda", "bfloat16", 2, 8, 8, 101, 101, 64, 64, Band.parse(mask), scale)


def test_grouped_heads_arrive_as_they_are() -> None:
    graph, record = rewritten(joint_graph(flash, Shape(kv_heads=2)))
    assert record.site is not None
    assert (record.site.kv_heads, record.site.group) == (2, 4)
    assert call(graph, BACKWARD)["key"].meta["val"].shape[1] == 2


def test_padded_head_dim_keeps_its_scale() -> None:
    """PyTorch pads 60 to 64 and gives the scale of 60."""

    def padded(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Any, ...]:
        q, k, v, do = (aten.constant_pad_nd(t, [0, 4]) for t in (q, k, v, do))
        out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, scale=60**-0.5)
        backward = aten._scaled_dot_product_efficient_attention_backward
        grads = backward(do, q, k, v, None, out, lse, seed, offset, 0.0, [True, True, True, False], scale=60**-0.5)
        return tuple(aten.slice(t, 3, 0, 60) for t in (out, *grads[:3]))

    graph, record = rewritten(joint_graph(padded, Shape(head_dim=60, value_dim=60)))
    assert record.site is not None
    assert (record.site.head_dim, record.site.scale) == (64, 60**-0.5)
    assert op_counts(graph)[BACKWARD] == 1


@pytest.mark.parametrize(("maker", "lse_shape"), [(flash, (2, 8, 101)), (efficient, (2, 8, 128)), (cudnn, (2, 8, 101))])
def test_kept_forward_and_its_log_sum_exp(maker, lse_shape) -> None:
    """The backward reads what the kept forward wrote: padded for efficient, without cuDNN's trailing dimension."""
    with config.patch(forward="keep"):
        graph, record = rewritten(joint_graph(maker, Shape(q_len=101, kv_len=101), causal=True))
    assert (op_counts(graph)[FORWARD], op_counts(graph)[BACKWARD]) == (0, 1)
    backward = call(graph, BACKWARD)
    assert backward["logsumexp"].meta["val"].shape == lse_shape
    assert "forward=keep" in backward["plan"]
    assert record.forward == "kept: by the setting forward='keep'"


def test_forward_whose_log_sum_exp_is_an_output_is_kept() -> None:
    def with_lse(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Any, ...]:
        out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, None, True)
        backward = aten._scaled_dot_product_efficient_attention_backward
        grads = backward(do, q, k, v, None, out, lse, seed, offset, 0.0, [True, True, True, False])
        return out, lse, *grads[:3]

    graph, record = rewritten(joint_graph(with_lse))
    assert (op_counts(graph)[FORWARD], op_counts(graph)[BACKWARD]) == (0, 1)
    assert record.forward == "kept: log-sum-exp or random state has other users"


def test_forward_with_a_kept_backward_is_kept() -> None:
    """Two backwards of one forward, one with dropout: only the other is replaced."""

    def two(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Any, ...]:
        out, lse, cq, ck, mq, mk, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
        backward = aten._scaled_dot_product_flash_attention_backward
        arguments = (do, q, k, v, out, lse, cq, ck, mq, mk)
        return out, *(g for p in (0.0, 0.5) for g in backward(*arguments, p, True, seed, offset))

    module = joint_graph(two)
    rewrite_graph(module.graph)
    assert op_counts(module.graph)[FORWARD] == 0
    assert {(r.status, r.forward) for r in sites()} == {
        ("replaced", "kept: log-sum-exp or random state has other users"),
        ("kept", "kept"),
    }


def test_backward_without_its_forward_in_the_graph() -> None:
    """As compiled autograd leaves it after an eager forward: the saved tensors are inputs of the graph."""
    graph, record = rewritten(joint_graph(flash_backward))
    assert op_counts(graph)[BACKWARD] == 1
    assert (record.status, record.forward) == ("replaced", "kept: not in this graph")


def test_two_backwards_of_one_forward_share_the_new_forward() -> None:
    def two(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Any, ...]:
        out, lse, cq, ck, mq, mk, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
        backward = aten._scaled_dot_product_flash_attention_backward
        return out, *(
            g for x in (do, do * 2) for g in backward(x, q, k, v, out, lse, cq, ck, mq, mk, 0.0, True, seed, offset)
        )

    module = joint_graph(two)
    rewrite_graph(module.graph)
    module.graph.lint()
    counts = op_counts(module.graph)
    assert (counts[FORWARD], counts[BACKWARD], counts["aten::_scaled_dot_product_flash_attention"]) == (1, 2, 0)


def test_metadata_is_inherited_except_values() -> None:
    module = joint_graph(flash)
    tags = {"recompute": "must", "ac_graph_id": 3, "seq_nr": 7, "stack_trace": 'File "model.py", line 5, in f'}
    for node in module.graph.nodes:
        node.meta |= tags
        node.meta["eager_input_vals"] = "stale"
    graph, record = rewritten(module)
    new = [n for n in graph.nodes if attention_ops.op_name(n) in (FORWARD, BACKWARD)]
    for node in [*new, *(user for n in new for user in n.users)]:
        assert tags.items() <= node.meta.items()
        assert "eager_input_vals" not in node.meta or attention_ops.op_name(node) == "aten::alias"
    assert record.source == "model.py:5"


def test_second_run_changes_nothing() -> None:
    module = joint_graph(flash)
    rewrite_graph(module.graph)
    text = str(module.graph)
    rewrite_graph(module.graph)
    kept = joint_graph(flash, dropout=0.5)
    rewrite_graph(kept.graph)
    rewrite_graph(kept.graph)
    assert str(module.graph) == text
    assert [r.status for r in sites()] == ["replaced", "kept"]


def test_nothing_happens_when_off() -> None:
    module = joint_graph(flash)
    text = str(module.graph)
    with dash_inductor.disabled():
        rewrite_graph(module.graph)
    torch.use_deterministic_algorithms(False)
    rewrite_graph(module.graph)
    assert (str(module.graph), sites()) == (text, ())


# ---- every reason to keep a site ----


def varlen(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Any, ...]:
    q, k, v, do = (t.transpose(1, 2).reshape(-1, 8, 64) for t in (q, k, v, do))
    cu = torch.zeros(3, dtype=torch.int32, device="cuda")
    out, lse, seed, unused, _ = aten._flash_attention_forward(q, k, v, cu, cu, 128, 128, 0.0, True, False)
    return aten._flash_attention_backward(do, q, k, v, out, lse, cu, cu, 128, 128, 0.0, True, seed, unused)[:3]


def flash_backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, lse: tuple[int, ...] = (2, 8, 128)
) -> tuple[Any, ...]:
    """The backward alone, so that shapes can be what no forward gives."""
    lse_tensor = torch.empty(lse, device="cuda")
    rng = torch.empty(2, dtype=torch.uint64, device="cuda")
    backward = aten._scaled_dot_product_flash_attention_backward
    return backward(do, q, k, v, torch.empty_like(do), lse_tensor, None, None, 128, 128, 0.0, True, rng, rng)


def segment_bias() -> Tensor:
    """Two packed documents: same half of the sequence."""
    half = torch.arange(128, device="cuda") // 64
    zero, low = (torch.full((), x, dtype=torch.bfloat16, device="cuda") for x in (0.0, -math.inf))
    return torch.where(half.unsqueeze(0) == half.unsqueeze(1), zero, low)


@pytest.mark.parametrize(
    ("reason", "maker", "shape", "options"),
    [
        (Reason.DROPOUT, flash, {}, {"dropout": 0.1}),
        (Reason.DTYPE, flash_backward, {"dtype": torch.float64}, {}),
        (Reason.HEAD_DIM, flash, {"head_dim": 136, "value_dim": 136}, {}),
        (Reason.HEAD_DIM, efficient, {"head_dim": 60, "value_dim": 60}, {}),
        (Reason.VALUE_DIM, efficient, {"value_dim": 32}, {}),
        (Reason.SHAPE, flash_backward, {"kv_heads": 3}, {}),
        (Reason.CAUSAL_LENGTHS, flash, {"q_len": 64}, {}),
        (Reason.LAYOUT, flash_backward, {}, {"lse": (8, 256)}),
        (Reason.BIAS_GRADIENT, efficient, {}, {"bias": lambda: causal_bias(128), "bias_grad": True}),
        (Reason.MASK_NOT_A_BAND, efficient, {}, {"bias": segment_bias}),
        (Reason.VARLEN, varlen, {}, {}),
    ],
)
def test_reasons(reason, maker, shape, options) -> None:
    module = joint_graph(maker, Shape(**shape), **options)
    text = str(module.graph)
    graph, record = rewritten(module)
    assert (record.status, record.reason) == ("kept", reason)
    assert str(graph) == text


def test_mask_from_an_input() -> None:
    def with_input(q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Tensor) -> tuple[Any, ...]:
        return efficient(q, k, v, do, bias=lambda: mask)

    def inputs() -> list[Tensor]:
        return [*cuda_inputs(Shape()), torch.empty(2, 8, 128, 128, dtype=torch.bfloat16, device="cuda")]

    _, record = rewritten(trace(with_input, inputs))
    assert record.reason is Reason.MASK_DEPENDS_ON_INPUT


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


def test_architecture_without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 0))
    _, record = rewritten(joint_graph(flash))
    assert record.reason is Reason.SCHEDULE_UNSUPPORTED
    assert "sm_70" in record.detail
    assert record.site is not None


def test_flex_attention_is_kept() -> None:
    """A node of the higher-order operator, by name: its own tracing is PyTorch's business."""
    graph = joint_graph(flash).graph
    query = next(iter(graph.nodes))
    with graph.inserting_before(graph.output_node()):
        node = graph.call_function(torch.ops.higher_order.flex_attention_backward, (query,))
    rewrite_graph(graph)
    assert {r.name: r.reason for r in sites()}[node.name] is Reason.FLEX_ATTENTION


def test_every_reason_has_one_sentence() -> None:
    for reason in Reason:
        assert re.fullmatch(r"[A-Z][^\n]*\.", reason.explanation), reason
        assert Reason(reason.value) is reason


# ---- failing ----


def test_strict_names_reason_and_source() -> None:
    module = joint_graph(flash, dropout=0.1)
    for node in module.graph.nodes:
        node.meta["stack_trace"] = '  File "/home/me/model.py", line 12, in forward\n    attend(q)\n'
    with config.patch(strict=True), pytest.raises(SiteKeptError, match=r"dropout: .*at /home/me/model\.py:12"):
        rewrite_graph(module.graph)
    assert [r.reason for r in sites()] == [Reason.DROPOUT]


def test_strict_accepts_replaced_sites_and_cpu_sites_that_are_off() -> None:
    def on_cpu(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Any, ...]:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(do, q, k, v, out, lse, 0.0, False)

    cpu = trace(on_cpu, lambda: [torch.empty(2, 4, 32, 16) for _ in range(4)])
    with config.patch(strict=True):
        rewrite_graph(joint_graph(flash).graph)
        rewrite_graph(cpu.graph)
    assert [r.reason for r in sites()] == [None, Reason.CPU_OFF]


@pytest.mark.parametrize("stage", ["reading", "replacing"])
def test_unexpected_errors_keep_the_site_and_warn(stage, monkeypatch, caplog) -> None:
    module = joint_graph(efficient, bias=lambda: causal_bias(128))
    text = str(module.graph)
    if stage == "reading":
        monkeypatch.setattr(sites_module, "plan", lambda *args, **kwargs: 1 / 0)
    else:
        original = emit.Emitter.call

        def call_then_fail(self: emit.Emitter, target: Any, *args: Any, **kwargs: Any) -> Any:
            node = original(self, target, *args, **kwargs)
            if target is torch.ops.dash.attention_backward.default:
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
    with config.patch(strict=True), pytest.raises(SiteKeptError, match="internal_error"):
        rewrite_graph(again.graph)


# ---- the parts ----


def test_arguments_are_bound_by_name() -> None:
    for backend in attention_ops.BACKENDS.values():
        packet = getattr(aten, backend.backward.removeprefix("aten::"))
        names = {argument.name for argument in packet.default._schema.arguments}
        wanted = {"query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal", "scale", backend.grad_out}
        assert wanted | ({backend.mask} if backend.mask else set()) <= names
        assert hasattr(aten, backend.forward.removeprefix("aten::"))
    module = joint_graph(efficient)
    node = next(n for n in module.graph.nodes if attention_ops.is_attention_backward(n))
    bound = attention_ops.bind(node)
    assert (bound["attn_bias"], bound["scale"], bound["grad_input_mask"]) == (None, None, [True, True, True, False])


@given(st.permutations(range(4)), st.tuples(*[st.integers(1, 4)] * 4))
def test_order_of_a_dense_tensor_reproduces_its_strides(order: list[int], size: tuple[int, ...]) -> None:
    tensor = torch.empty_permuted(size, order)
    found = layout.dense_order(tensor.shape, tensor.stride())
    assert found is not None
    assert torch.empty_permuted(size, found).stride() == tensor.stride()


@pytest.mark.parametrize("stride", [(0, 12, 4, 1), (48, 12, 4, 2), (24, 12, 4, 4), (96, 24, 4, 1)])
def test_tensors_that_are_not_dense_have_no_order(stride: tuple[int, ...]) -> None:
    assert layout.dense_order((2, 4, 3, 4), stride) is None


def test_dimension_of_size_one_may_have_any_stride() -> None:
    assert layout.dense_order((1, 4, 3, 4), (999, 12, 4, 1)) is not None


bound = st.none() | st.integers(-6, 6)
bands = st.builds(
    lambda lo, hi, anchor: Band(*((lo, hi) if None in (lo, hi) or lo <= hi else (hi, lo)), anchor),
    bound,
    bound,
    st.sampled_from(["top_left", "bottom_right"]),
)


@given(bands, bands, st.integers(1, 5), st.integers(1, 5))
def test_intersection_shows_what_both_show(a: Band, b: Band, q_len: int, kv_len: int) -> None:
    cells = list(itertools.product(range(q_len), range(kv_len)))
    both = [cell for cell in cells if a.visible(*cell, q_len, kv_len) and b.visible(*cell, q_len, kv_len)]
    try:
        band = intersect([a, b], q_len, kv_len)
    except Kept:
        band = None
    assert [cell for cell in cells if band is not None and band.visible(*cell, q_len, kv_len)] == both


def test_intersection_with_dynamic_lengths() -> None:
    assert intersect([Band(0, None), Band(None, 7)], None, None) == Band(0, 7)
    assert intersect([Band(), Band(0, None, "bottom_right")], None, None) == Band(0, None, "bottom_right")
    with pytest.raises(Kept):
        intersect([Band(0, None), Band(None, 7, "bottom_right")], None, None)


def test_planner_errors_are_reasons_not_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise ArgumentError("mask", "x", "something else")

    monkeypatch.setattr(sites_module, "plan", refuse)
    _, record = rewritten(joint_graph(flash))
    assert (record.reason, record.detail) == (
        Reason.SCHEDULE_UNSUPPORTED,
        "mask='x' is not allowed: expected something else",
    )
    assert rewrite.log.name == "dash_inductor"
