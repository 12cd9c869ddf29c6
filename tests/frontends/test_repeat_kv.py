"""Grouped heads: `enable_gqa`, and key/value repeated by the model, whose repeats and sums leave the graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor.records.records import sites

from ..support.graphs import BACKWARD, FORWARD, assert_as_exact, capture, step, tensors

pytestmark = pytest.mark.usefixtures("deterministic")

SHAPES = [(2, 6, 40, 16), (2, 2, 40, 16), (2, 2, 40, 16)]
GROUP = 3


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def repeat_heads(x: Tensor) -> Tensor:
    """As in transformers: [B, H_kv, S, D] to [B, H, S, D]."""
    batch, heads, length, dim = x.shape
    return x[:, :, None, :, :].expand(batch, heads, GROUP, length, dim).reshape(batch, heads * GROUP, length, dim)


def repeat_before_transpose(x: Tensor) -> Tensor:
    """The heads are repeated in [B, S, H_kv, D], then transposed, as in torchtitan."""
    x = x.transpose(1, 2)
    batch, length, heads, dim = x.shape
    x = x[:, :, :, None, :].expand(batch, length, heads, GROUP, dim).reshape(batch, length, heads * GROUP, dim)
    return x.transpose(1, 2)


def interleave(x: Tensor) -> Tensor:
    return x.repeat_interleave(GROUP, dim=1)


def five_dimensions(x: Tensor) -> Tensor:
    """The dimension that is expanded exists before, as in a fused projection viewed as [B, S, H_kv, 1, D]."""
    x = (x * 2).transpose(1, 2).reshape(2, 40, 2, 1, 16)
    return x.expand(2, 40, 2, GROUP, 16).reshape(2, 40, 2 * GROUP, 16).transpose(1, 2)


def with_repeat(repeat: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, v: attention(q, repeat(k), repeat(v))


def test_enable_gqa() -> None:
    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    inputs = tensors(*SHAPES)
    with capture() as graphs:
        results = step(torch.compile(grouped), inputs)
    assert graphs.count(BACKWARD) == 1
    (record,) = sites()
    assert record.site is not None
    assert (record.site.q_heads, record.site.kv_heads) == (6, 2)
    assert_as_exact(grouped, inputs, results)


@pytest.mark.parametrize("repeat", [repeat_heads, repeat_before_transpose, interleave, five_dimensions])
def test_repeats_and_sums_disappear(repeat) -> None:
    inputs = tensors(*SHAPES)
    with capture() as graphs:
        compiled = graphs.compile(with_repeat(repeat))
        results, again = step(compiled, inputs), step(compiled, inputs)
    assert (graphs.count_before("aten::expand"), graphs.count_before("aten::sum")) == (2, 2)
    assert (graphs.count("aten::expand"), graphs.count("aten::sum")) == (0, 0)
    assert (graphs.count(FORWARD), graphs.count(BACKWARD)) == (1, 1)
    (record,) = sites()
    assert record.site is not None
    assert (record.site.kv_heads, record.site.group) == (2, GROUP)
    assert record.detail == "key and value repeat each head 3 times: the tensors before that are read"
    assert_as_exact(with_repeat(repeat), inputs, results)
    assert all(torch.equal(a, b) for a, b in zip(results, again, strict=True))


@pytest.mark.parametrize("repeat", [repeat_heads, repeat_before_transpose, five_dimensions])
def test_repeats_are_seen_through_the_cast_of_autocast(repeat: Callable[[Tensor], Tensor]) -> None:
    """After rotary embeddings the key is float32, is repeated, then cast; the value is cast before its repeat."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attention(q * 1.5, repeat(k * 1.5), repeat(v.bfloat16()))

    inputs = tensors(*SHAPES)
    with capture() as graphs:
        compiled = graphs.compile(model)
        results, again = step(compiled, inputs), step(compiled, inputs)
    (record,) = sites()
    assert record.site is not None
    assert (record.site.dtype, record.site.kv_heads, record.site.group) == ("bfloat16", 2, GROUP)
    assert (graphs.count("aten::expand"), graphs.count("aten::sum")) == (0, 0)
    assert graphs.count("prims::convert_element_type") == graphs.count_before("prims::convert_element_type")
    assert all(torch.equal(a, b) for a, b in zip(results, again, strict=True))
    assert [t.dtype for t in results] == [torch.bfloat16, *[torch.float32] * 3]
    assert_as_exact_in_low_precision(model, inputs, results)


def assert_as_exact_in_low_precision(
    function: Callable[..., Tensor], inputs: list[Tensor], results: list[Tensor]
) -> None:
    """At most twice as far from float32 without autocast as eager is with it."""
    eager = step(function, inputs)
    with torch.autocast("cpu", enabled=False):
        exact = step(lambda q, k, v: attention(q * 1.5, *(repeat_heads(x) for x in (k * 1.5, v))), inputs)
    for ours, theirs, true in zip(results, eager, exact, strict=True):
        floor = 2**-7 * true.abs().max()
        assert (ours - true).abs().max() <= 2 * (theirs - true).abs().max() + floor


@pytest.mark.parametrize("wide", [False, True])
def test_a_cast_rounds_the_sum_of_the_group_once(wide: bool) -> None:
    """The gradient of key as the consumer reads it is the operator's own, cast: `wide` casts up instead of down."""
    low, high = (torch.bfloat16, torch.float32) if wide else (torch.float32, torch.bfloat16)

    def cast_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q.to(high), repeat_heads(k).to(high), repeat_heads(v).to(high))

    def cast_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q.to(high), repeat_heads(k.to(high)), repeat_heads(v.to(high)))

    inputs = tensors(*SHAPES, dtype=low)
    results = []
    for function in (cast_after, cast_before):
        with capture() as graphs:
            results.append(step(graphs.compile(function), inputs))
        assert [r.site and r.site.kv_heads for r in sites()] == [2]
        assert graphs.count("aten::sum") == 0
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_two_casts_between_repeat_and_attention_are_not_seen_through() -> None:
    """Inductor of torch 2.11 and 2.12 removes such a pair of casts itself, before the repeat is looked for."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, *(repeat_heads(x).half().float() for x in (k, v)))

    inputs = tensors(*SHAPES)
    with capture() as graphs:
        results = step(graphs.compile(model), inputs)
    assert graphs.count(BACKWARD) == 1
    assert [r.site and r.site.kv_heads for r in sites()] == [2 if torch.__version__ < (2, 13) else 6]
    for ours, eager in zip(results, step(model, inputs), strict=True):
        torch.testing.assert_close(ours, eager, atol=1e-3, rtol=1e-2)


def test_a_cast_to_float16_is_not_seen_through() -> None:
    """The gradients of three heads are each in range of float16, their sum is not: the graph sums them in float32."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q.half(), repeat_heads(k).half(), repeat_heads(v).half())

    inputs = tensors(*SHAPES)

    def loss(function: Callable[..., Tensor]) -> Tensor:
        out = function(*inputs)
        return torch.autograd.grad(out, inputs, torch.full_like(out, 9000.0))[2]

    with capture() as graphs:
        gradient = loss(graphs.compile(model))
    assert graphs.count(BACKWARD) == 1
    assert [r.detail for r in sites()] == [
        "key and value repeat heads, but are cast to torch.float16 after that: the repeated tensors are read"
    ]
    assert gradient.isfinite().all()


def test_a_sum_in_another_dtype_is_the_graphs_own() -> None:
    """The gradient is summed in float64: more than the operator returns, so the repeated tensors are read."""

    class Repeat(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]  # as PyTorch calls it
            return repeat_heads(x)

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]  # as PyTorch calls it
            return grad.unflatten(1, (2, GROUP)).sum(2, dtype=torch.float64).float()

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, Repeat.apply(k), Repeat.apply(v))

    with capture() as graphs:
        step(graphs.compile(model), tensors(*SHAPES))
    assert graphs.count(BACKWARD) == 1
    assert [r.site and r.site.kv_heads for r in sites()] == [6]


def test_dynamic_lengths() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return with_repeat(repeat_heads)(q, k, v)

    with capture() as graphs:
        compiled = graphs.compile(model)
        for length in (40, 23):
            inputs = tensors(*[(2, heads, length, 16) for heads in (6, 2, 2)])
            for tensor in inputs:
                torch._dynamo.mark_dynamic(tensor, 2)
            assert_as_exact(model, inputs, step(compiled, inputs))
    assert len(graphs.after) == 1
    assert (graphs.count("aten::expand"), graphs.count("aten::sum")) == (0, 0)


def test_repeat_in_the_other_order_is_no_group() -> None:
    """``x.repeat`` puts copies of all heads one after the other: query head h reads key head h % 2, not h // 3."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k.repeat(1, GROUP, 1, 1), v.repeat(1, GROUP, 1, 1))

    inputs = tensors(*SHAPES)
    with capture() as graphs:
        results = step(graphs.compile(model), inputs)
    assert graphs.count(BACKWARD) == 1
    assert [r.site.kv_heads for r in sites() if r.site] == [6]
    assert_as_exact(model, inputs, results)


def test_only_value_repeats() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, repeat_heads(v))

    inputs = tensors(SHAPES[0], SHAPES[0], SHAPES[2])
    with capture() as graphs:
        results = step(graphs.compile(model), inputs)
    assert graphs.count(BACKWARD) == 1
    assert [r.detail for r in sites()] == ["only one of key and value repeats heads: the repeated tensor is read"]
    assert_as_exact(model, inputs, results)


def test_repeats_are_padded() -> None:
    """As PyTorch pads a head dim that is no multiple of 8, after the model's repeat."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(*(F.pad(x, (0, 4)) for x in (q, repeat_heads(k), repeat_heads(v))))[..., :12]

    inputs = tensors(*[(*shape[:3], 12) for shape in SHAPES])
    with capture() as graphs:
        results = step(graphs.compile(model), inputs)
    assert graphs.count(BACKWARD) == 1
    (record,) = sites()
    assert record.detail == "key and value repeat heads, but are padded after that: the repeated tensors are read"
    assert_as_exact(model, inputs, results)


def test_repeated_key_has_another_use() -> None:
    """The repeated key's gradient is added to another one before the sum: the repeated tensors stay the operands."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        key = repeat_heads(k)
        return attention(q, key, repeat_heads(v)) + key

    inputs = tensors(*SHAPES)
    with capture() as graphs:
        results = step(graphs.compile(model), inputs)
    assert graphs.count(BACKWARD) == 1
    (record,) = sites()
    assert record.site is not None
    assert record.site.group == 1
    assert record.detail.endswith("the repeated tensors are read")
    assert_as_exact(model, inputs, results)


def test_key_without_gradient() -> None:
    def model(q: Tensor, v: Tensor) -> Tensor:
        key = torch.ones(2, 2, 40, 16, dtype=q.dtype) * torch.arange(40)[:, None] / 40
        return attention(q, repeat_heads(key), repeat_heads(v))

    inputs = tensors(SHAPES[0], SHAPES[2])
    with capture() as graphs:
        results = step(graphs.compile(model), inputs)
    assert graphs.count(BACKWARD) == 1
    assert [r.site.kv_heads for r in sites() if r.site] == [2]
    assert_as_exact(model, inputs, results)
