"""The rewrite inside compiles on the CPU: which operators the joint graph has afterwards, and what they compute."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dash_inductor
from dash_inductor.records.records import sites

from ...support.graphs import BACKWARD, CPU_BACKWARD, CPU_FORWARD, FORWARD, assert_as_exact, capture, step, tensors

pytestmark = pytest.mark.usefixtures("deterministic")

QKV = [(2, 4, 48, 16)] * 3


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=0.3)


def transposed_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.view(2, 48, 4, 16).transpose(1, 2) for t in (q, k, v))
    return causal(q, k, v).transpose(1, 2)


def boolean_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    index = torch.arange(q.shape[2])
    mask = (index[None, :] <= index[:, None]) & (index[None, :] > index[:, None] - 7)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None])


def additive_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.full((q.shape[2], k.shape[2]), -math.inf).triu(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def hand_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).div(math.sqrt(q.shape[-1])).softmax(-1) @ v


@pytest.mark.parametrize(
    ("function", "mask"),
    [
        (causal, "causal"),
        (full, "full"),
        (transposed_heads, "causal"),
        (boolean_mask, "band(0,6)"),
        (additive_mask, "causal"),
    ],
)
def test_forward_and_backward_are_replaced(function, mask) -> None:
    inputs = tensors(*QKV)
    with capture(plane_length=48) as graphs:
        compiled = graphs.compile(function)
        first, second = step(compiled, inputs), step(compiled, inputs)
    assert (graphs.count_before(CPU_FORWARD), graphs.count_before(CPU_BACKWARD)) == (1, 1)
    assert (graphs.count(CPU_FORWARD), graphs.count(CPU_BACKWARD)) == (0, 0)
    assert (graphs.count(FORWARD), graphs.count(BACKWARD)) == (1, 1)
    assert graphs.planes == []
    (record,) = sites()
    assert (record.status, record.reason, record.mask, record.detail) == ("replaced", None, mask, "")
    assert record.source.startswith(f"{__file__}:")
    assert_as_exact(function, inputs, first)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_hand_written_attention_is_replaced() -> None:
    inputs = tensors(*QKV)
    with capture(plane_length=48) as graphs:
        results = step(graphs.compile(hand_written), inputs)
    assert (
        graphs.count_before("aten::_softmax") + graphs.count_before("prims::exp") + graphs.count_before("aten::exp")
        == 1
    )
    assert (graphs.count(FORWARD), graphs.count(BACKWARD)) == (1, 1)
    assert graphs.planes == []
    assert sites()[0].mask == "full"
    with dash_inductor.disabled(), capture() as graphs:
        plain = step(graphs.compile(hand_written), inputs)
    assert [t.stride() for t in results] == [t.stride() for t in plain]
    assert_as_exact(hand_written, inputs, results, strides=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype) -> None:
    inputs = tensors(*QKV, dtype=dtype)
    with capture() as graphs:
        results = step(graphs.compile(causal), inputs)
    assert graphs.count(BACKWARD) == 1
    assert_as_exact(causal, inputs, results)


def test_fused_qkv() -> None:
    def fused(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (x @ w).view(2, 48, 3, 4, 16).permute(2, 0, 3, 1, 4)
        return causal(q, k, v).transpose(1, 2).reshape(2, 48, 64)

    inputs = tensors((2, 48, 64), (64, 192))
    with capture() as graphs:
        results = step(graphs.compile(fused), inputs)
    assert (graphs.count(FORWARD), graphs.count(BACKWARD)) == (1, 1)
    assert_as_exact(fused, inputs, results)


def test_query_and_key_lengths_differ() -> None:
    inputs = tensors((2, 4, 17, 16), (2, 4, 48, 16), (2, 4, 48, 16))
    with capture() as graphs:
        results = step(graphs.compile(causal), inputs)
    assert graphs.count(BACKWARD) == 1
    assert_as_exact(causal, inputs, results)


def test_two_calls_with_different_masks_in_one_graph() -> None:
    def both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal(boolean_mask(q, k, v), k, v)

    inputs = tensors(*QKV)
    with capture(plane_length=48) as graphs:
        results = step(graphs.compile(both), inputs)
    assert (len(graphs.after), graphs.count(FORWARD), graphs.count(BACKWARD), graphs.planes) == (1, 2, 2, [])
    assert sorted(r.mask for r in sites()) == ["band(0,6)", "causal"]
    assert len({r.name for r in sites()}) == 2
    assert all(r.name in graphs.texts[0] for r in sites())
    assert_as_exact(both, inputs, results)


def test_dynamic_lengths_compile_once() -> None:
    with capture() as graphs:
        compiled = torch.compile(causal)
        for length in (48, 31):
            inputs = tensors(*[(2, 4, length, 16)] * 3)
            for tensor in inputs:
                torch._dynamo.mark_dynamic(tensor, 0)
                torch._dynamo.mark_dynamic(tensor, 2)
            assert_as_exact(causal, inputs, step(compiled, inputs))
    assert (len(graphs.after), graphs.count(BACKWARD)) == (1, 1)
    (record,) = sites()
    assert record.site is not None
    assert (record.site.batch, record.site.q_len, record.site.kv_len) == (None, None, None)


def test_dynamic_heads_and_head_dims_are_fixed_by_guards() -> None:
    """One function, other heads and head dimensions from call to call: each combination compiles once."""
    shapes = [(8, 8, 16), (4, 4, 16), (16, 16, 16), (4, 2, 16), (4, 2, 32), (8, 8, 16), (4, 2, 32)]

    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    with capture() as graphs:
        compiled = graphs.compile(grouped)
        for heads, kv_heads, dim in shapes:
            inputs = tensors((2, heads, 24, dim), (2, kv_heads, 24, dim), (2, kv_heads, 24, dim))
            assert_as_exact(grouped, inputs, step(compiled, inputs))
    assert [(r.status, r.site and (r.site.q_heads, r.site.kv_heads, r.site.head_dim)) for r in sites()] == [
        ("replaced", shape) for shape in dict.fromkeys(shapes)
    ]
    assert graphs.count(BACKWARD) == len(graphs.after) == len(set(shapes))


def test_repeated_heads_that_are_dynamic_are_fixed_by_guards() -> None:
    def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal(q, *(x.repeat_interleave(2, dim=1) for x in (k, v)))

    with capture() as graphs:
        compiled = graphs.compile(repeated)
        for kv_heads in (4, 2, 8, 4):
            inputs = tensors((2, 2 * kv_heads, 24, 16), (2, kv_heads, 24, 16), (2, kv_heads, 24, 16))
            assert_as_exact(repeated, inputs, step(compiled, inputs))
    assert [r.site and (r.site.q_heads, r.site.kv_heads) for r in sites()] == [(8, 4), (4, 2), (16, 8)]


def test_heads_that_the_user_marked_as_dynamic_stay_dynamic() -> None:
    """A guard on them would end the compile: the user promised that no code fixes them."""
    inputs = tensors(*[(2, 4, 24, 16)] * 3)
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 1)
    with capture() as graphs:
        graphs.compile(causal)(*inputs).sum().backward()
    assert [r.reason and r.reason.value for r in sites()] == ["dynamic_dims"]
    assert graphs.count(CPU_BACKWARD) == 1


def test_a_fallback_site_adds_no_guard() -> None:
    with capture() as graphs:
        compiled = graphs.compile(causal)
        for heads in (4, 8, 16, 2):
            compiled(*tensors(*[(2, heads, 24, 16)] * 3, dtype=torch.float64)).sum().backward()
    assert [r.reason and r.reason.value for r in sites()] == ["dtype"] * 2  # static, then dynamic heads


def test_nested_compile_region() -> None:
    @torch.compiler.nested_compile_region
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal(q, k, v)

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return layer(layer(q, k, v), k, v)

    inputs = tensors(*QKV)
    with capture() as graphs:
        results = step(graphs.compile(model, fullgraph=True), inputs)
    assert (graphs.count(CPU_FORWARD), graphs.count(CPU_BACKWARD)) == (0, 0)
    assert graphs.count(BACKWARD) > 0
    assert {r.status for r in sites()} == {"replaced"}
    assert_as_exact(model, inputs, results)


@pytest.mark.parametrize("how", ["not deterministic", "disabled", "cpu off"])
def test_left_alone(how: str) -> None:
    """Nothing changes in the graph; with ``cpu="off"`` the site is still recorded."""
    inputs = tensors(*QKV)
    torch.use_deterministic_algorithms(how != "not deterministic")
    with dash_inductor.disabled(), capture() as plain:
        step(plain.compile(causal), inputs)
    with capture(cpu="off" if how == "cpu off" else "reference") as graphs:
        if how == "disabled":
            with dash_inductor.disabled():
                step(graphs.compile(causal), inputs)
        else:
            step(graphs.compile(causal), inputs)
    assert graphs.texts == plain.texts
    assert [r.reason.value for r in sites() if r.reason] == (["cpu_off"] if how == "cpu off" else [])


def test_warn_only_counts_as_deterministic() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    with capture() as graphs:
        step(graphs.compile(causal), tensors(*QKV))
    assert graphs.count(BACKWARD) == 1


@pytest.mark.parametrize("function", [causal, full, boolean_mask, additive_mask])
def test_setting_forward_keep(function) -> None:
    """The forward is PyTorch's own node, and its output has PyTorch's own bits."""
    inputs = tensors(*QKV)
    with dash_inductor.disabled(), capture() as graphs:
        plain = step(graphs.compile(function), inputs)
    with capture(forward="keep") as graphs:
        results = step(graphs.compile(function), inputs)
    assert torch.equal(results[0], plain[0])
    assert (graphs.count(CPU_FORWARD), graphs.count(FORWARD), graphs.count(BACKWARD)) == (1, 0, 1)
    (record,) = sites()
    assert record.forward == "not replaced: by the setting forward='keep'"
    assert record.plan is not None
    assert record.plan.forward == "keep"
    assert f"forward=keep:{CPU_FORWARD}" in record.plan.numerics_key.split("/")
    assert_as_exact(function, inputs, results)


def test_setting_schedule_is_used_where_it_is_valid() -> None:
    inputs = tensors(*QKV)
    for function, expected in ((full, True), (causal, False)):
        with capture(schedule="shift") as graphs:
            step(graphs.compile(function), inputs)
        (record,) = sites()
        assert record.plan is not None
        assert (record.plan.schedule == "shift") is expected


def test_source_names_file_line_and_module() -> None:
    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return causal(q, k, v)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Attention()])

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.layers[0](q, k, v)

    with capture() as graphs:
        step(graphs.compile(Model()), tensors(*QKV))
    line = causal.__code__.co_firstlineno + 1
    assert sites()[0].source == f"{__file__}:{line} in layers.0"
