"""Sites of the CUDA operators, forward and backward on fake tensors: what replaces them, and what stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph
from torch.utils.checkpoint import CheckpointPolicy

import dash_inductor
from dash_inductor.config import config
from dash_inductor.graph import nodes
from dash_inductor.model import AttentionSpec, Band, Site
from dash_inductor.model.reasons import Reason
from dash_inductor.records.records import sites

from ...support.calls import spec_of
from ...support.graphs import (
    BACKWARD,
    FORWARD,
    Shape,
    causal_bias,
    cudnn,
    efficient,
    flash,
    flash_backward,
    joint_graph,
    op_counts,
    planes,
    rewrite_on,
    rewritten,
)

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("deterministic")


def outputs(graph: Graph) -> list[tuple[Any, ...]]:
    return [
        (n.meta["val"].shape, n.meta["val"].stride(), n.meta["val"].dtype) for n in graph.output_node().all_input_nodes
    ]


def call(graph: Graph, op: str) -> dict[str, Any]:
    """The arguments of the only call of an operator."""
    (node,) = (n for n in graph.nodes if nodes.op_name(n) == op)
    return nodes.bind(node)


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
    assert not [op for op in op_counts(graph) if "attention" in op and not op.startswith("dash_inductor::")]
    assert planes(graph, 101) == []
    assert outputs(graph) == before
    forward, backward = call(graph, FORWARD), call(graph, BACKWARD)
    for arguments, results in ((forward, 1), (backward, 3)):
        described = AttentionSpec.parse(arguments["spec"])
        assert (str(described.mask), described.scale, len(described.orders)) == (mask, scale, results)
        assert arguments["extras"] == []
        assert arguments["site"] == record.name
        assert arguments["plan"] == str(record.plan)
    assert backward["logsumexp"].meta["val"].shape == (2, 8, 101)
    assert record.site == Site("cuda", "bfloat16", 2, 8, 8, 101, 101, 64, 64, spec_of(Band.parse(mask), scale))


def as_cudnn_is_given() -> Tensor:
    """A causal mask as PyTorch converts it up to torch 2.12."""
    index = torch.arange(101, device="cuda")
    facts: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    visible, hidden = (aten.scalar_tensor(value, **facts) for value in (0.0, -65504.0))
    return aten.where(index.unsqueeze(0) <= index.unsqueeze(1), visible, hidden)


def as_folded() -> Tensor:
    """The same, when Inductor has folded constants."""
    index = torch.arange(101, device="cuda")
    facts: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    visible, hidden = (aten.full([], value, **facts) for value in (0.0, -65536.0))
    return aten.where(index.unsqueeze(0) <= index.unsqueeze(1), visible, hidden)


@pytest.mark.parametrize(
    ("function", "mask"),
    [(F.scaled_dot_product_attention, "causal"), (torch.where, "full + bias"), (None, "full + bias")],
    ids=["PyTorch's", "the program's", "nobody's"],
)
@pytest.mark.parametrize("bias", [as_cudnn_is_given, as_folded])
def test_a_boolean_mask_in_front_of_cudnn(function: object, mask: str, bias: Callable[[], Tensor]) -> None:
    """Only PyTorch's own conversion means the boolean mask: a program that adds -65504 has it added."""
    module = joint_graph(cudnn, Shape(q_len=101, kv_len=101), causal=False, bias=bias)
    if function is not None:
        for node in module.graph.find_nodes(op="call_function", target=aten.where.self):
            node.meta["source_fn_stack"] = [("name", function)]
    graph, record = rewritten(module)
    assert (record.mask, record.status) == (mask, "replaced"), record.detail
    assert (planes(graph, 101) == []) is (mask == "causal")


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
def test_fallback_forward_and_its_log_sum_exp(maker, lse_shape) -> None:
    """The backward reads what PyTorch's forward wrote: padded for efficient, without cuDNN's trailing dimension."""
    with config.patch(forward="keep"):
        graph, record = rewritten(joint_graph(maker, Shape(q_len=101, kv_len=101), causal=True))
    assert (op_counts(graph)[FORWARD], op_counts(graph)[BACKWARD]) == (0, 1)
    backward = call(graph, BACKWARD)
    assert backward["logsumexp"].meta["val"].shape == lse_shape
    assert "forward=keep" in backward["plan"]
    assert record.forward == "not replaced: by the setting forward='keep'"


def test_forward_whose_random_state_is_an_output_is_not_replaced() -> None:
    def with_seed(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Any, ...]:
        out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, None, True)
        backward = aten._scaled_dot_product_efficient_attention_backward
        grads = backward(do, q, k, v, None, out, lse, seed, offset, 0.0, [True, True, True, False])
        return out, seed, *grads[:3]

    graph, record = rewritten(joint_graph(with_seed))
    assert (op_counts(graph)[FORWARD], op_counts(graph)[BACKWARD]) == (0, 1)
    assert record.forward == "not replaced: its random state or another result has other users"


def test_forward_with_a_fallback_backward_is_not_replaced() -> None:
    """Two backwards of one forward, one with a dropout that the forward has not: only the other is replaced."""

    def two(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Any, ...]:
        out, lse, cq, ck, mq, mk, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
        backward = aten._scaled_dot_product_flash_attention_backward
        arguments = (do, q, k, v, out, lse, cq, ck, mq, mk)
        return out, *(g for p in (0.0, 0.5) for g in backward(*arguments, p, True, seed, offset))

    module = joint_graph(two)
    rewrite_on(module.graph)
    assert op_counts(module.graph)[FORWARD] == 0
    assert {(r.status, r.reason, r.forward) for r in sites()} == {
        ("replaced", None, "not replaced: several backwards of one forward differ"),
        ("fallback", Reason.DROPOUT, "not replaced"),
    }


def test_backward_without_its_forward_in_the_graph() -> None:
    """As compiled autograd leaves it after an eager forward: the saved tensors are inputs of the graph."""
    graph, record = rewritten(joint_graph(flash_backward))
    assert op_counts(graph)[BACKWARD] == 1
    assert (record.status, record.forward) == ("replaced", "not replaced: not in this graph")


def test_two_backwards_of_one_forward_share_the_new_forward() -> None:
    def two(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Any, ...]:
        out, lse, cq, ck, mq, mk, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
        backward = aten._scaled_dot_product_flash_attention_backward
        return out, *(
            g for x in (do, do * 2) for g in backward(x, q, k, v, out, lse, cq, ck, mq, mk, 0.0, True, seed, offset)
        )

    module = joint_graph(two)
    rewrite_on(module.graph)
    counts = op_counts(module.graph)
    assert (counts[FORWARD], counts[BACKWARD], counts["aten::_scaled_dot_product_flash_attention"]) == (1, 2, 0)


def test_metadata_is_inherited_except_values() -> None:
    module = joint_graph(flash)
    tags = {
        "recompute": CheckpointPolicy.MUST_SAVE,
        "ac_graph_id": 3,
        "seq_nr": 7,
        "stack_trace": 'File "model.py", line 5, in f',
    }
    for node in module.graph.nodes:
        node.meta |= tags
        node.meta["eager_input_vals"] = "stale"
    graph, record = rewritten(module)
    new = [n for n in graph.nodes if nodes.op_name(n) in (FORWARD, BACKWARD)]
    for node in [*new, *(user for n in new for user in n.users)]:
        assert tags.items() <= node.meta.items()
        assert "eager_input_vals" not in node.meta or nodes.op_name(node) == "aten::alias"
    assert record.source == "model.py:5"


def test_second_run_changes_nothing() -> None:
    module = joint_graph(flash)
    rewrite_on(module.graph)
    text = str(module.graph)
    rewrite_on(module.graph)
    fallback = joint_graph(flash, dropout=1.0)
    rewrite_on(fallback.graph)
    rewrite_on(fallback.graph)
    assert str(module.graph) == text
    assert [r.status for r in sites()] == ["replaced", "fallback"]


def test_nothing_happens_when_off() -> None:
    module = joint_graph(flash)
    text = str(module.graph)
    with dash_inductor.disabled():
        rewrite_on(module.graph)
    torch.use_deterministic_algorithms(False)
    rewrite_on(module.graph)
    assert (str(module.graph), sites()) == (text, ())
