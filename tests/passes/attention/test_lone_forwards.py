"""Forwards without a backward in their graph: the kernels, plans and bits of training, and a record of their own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from dash_inductor.config import config
from dash_inductor.errors import FallbackError
from dash_inductor.model.reasons import Reason
from dash_inductor.records.records import FORWARD_ONLY, FULL, sites

from ...support.attention_frontends import ENTRIES, tensors_of
from ...support.graphs import BACKWARD, CPU_FORWARD, FORWARD, Shape, capture, cuda_inputs, op_counts, rewritten, trace

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("deterministic")


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.arange(q.shape[1], device=q.device)
    distance = place[:, None] - place
    mask = (distance >= 0) & (distance < 5)
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, attn_mask=mask)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {name: entry.function for name, entry in ENTRIES.items()}
FUNCTIONS["window"] = window


def inputs_of(name: str, dtype: torch.dtype) -> list[Tensor]:
    return list(tensors_of(ENTRIES.get(name, ENTRIES["plain"]), dtype=dtype).values())


EQUAL = [
    (name, dtype, dynamic)
    for name in FUNCTIONS
    for dtype in (torch.float32, torch.bfloat16)
    for dynamic in (False, True)
]


@pytest.mark.parametrize(
    ("name", "dtype", "dynamic"),
    # One or two of a function's four in every run of the tests, by turns.
    [
        pytest.param(*c, id="-".join(map(str, c)), marks=[] if i % 5 in (0, 2) else pytest.mark.full)
        for i, c in enumerate(EQUAL)
    ],
)
def test_bits_are_those_of_training(name: str, dtype: torch.dtype, dynamic: bool) -> None:
    """Hence the ratio of the probabilities that one policy gives with and without gradients is 1."""
    inputs = inputs_of(name, dtype)
    with capture(strict=True) as graphs:
        compiled = graphs.compile(FUNCTIONS[name], dynamic=dynamic)
        with torch.no_grad():
            scored = compiled(*inputs)
        trained = compiled(*inputs)
        evaluated = compiled(*(t.detach() for t in inputs))
    assert torch.equal(scored, trained)
    assert torch.equal(evaluated, trained)
    alone, *others = sites()
    assert (alone.kind, {record.kind for record in others}) == (FORWARD_ONLY, {FULL, FORWARD_ONLY})
    assert len({(str(record.plan), record.mask, record.status) for record in sites()}) == 1
    assert all(counts[CPU_FORWARD] == 0 for counts in graphs.after)
    backwards = [counts[BACKWARD] for counts in graphs.after]
    assert backwards.count(0) == len(graphs.after) - 1


@pytest.mark.parametrize("name", ["plain", "keys", "window", "grouped", "document starts", "ordered numbers"])
def test_a_row_alone_and_in_a_batch(name: str) -> None:
    inputs = [t.detach() for t in inputs_of(name, torch.float32)]
    with capture(strict=True) as graphs:
        compiled = graphs.compile(FUNCTIONS[name])
        both = compiled(*inputs)
        alone = compiled(*(t[1:] for t in inputs))
    assert torch.equal(both[1:], alone)


def test_a_part_without_gradients_in_a_graph_with_them() -> None:
    """The teacher of a distillation is in one joint graph with its student."""

    def losses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = FUNCTIONS["plain"](q, k, v)
        return (FUNCTIONS["plain"](q * 2, k, v) - teacher).square().sum()

    inputs = inputs_of("plain", torch.float32)
    with capture(strict=True) as graphs:
        graphs.compile(losses)(*inputs).backward()
    assert [record.kind for record in sites()] == [FORWARD_ONLY, FULL]
    assert (graphs.count(FORWARD), graphs.count(BACKWARD)) == (2, 1)


def test_a_setting_keeps_all_forwards() -> None:
    """That does not count as a fallback against the program's will."""
    inputs = [t.detach() for t in inputs_of("plain", torch.float32)]
    with capture(strict=True, forward="keep") as graphs:
        found = graphs.compile(FUNCTIONS["plain"])(*inputs)
    (record,) = sites()
    assert (record.status, record.reason, record.kind) == ("fallback", Reason.FORWARD_OFF, FORWARD_ONLY)
    assert graphs.count(CPU_FORWARD) == 1
    with capture(cpu="off") as graphs:
        plain = graphs.compile(FUNCTIONS["plain"])(*inputs)
    (record,) = sites()
    assert (record.reason, record.kind) == (Reason.CPU_OFF, FORWARD_ONLY)
    assert torch.equal(found, plain)


def test_more_than_the_output_is_used() -> None:
    starts = torch.tensor([0, 7, 33], dtype=torch.int32)
    packed = [t.detach()[0] for t in inputs_of("plain", torch.float32)]

    def both(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return torch.ops.torch_attn._varlen_attn(q, k, v, starts, starts, 33, 33, True)[::2]

    with capture(strict=True) as graphs, pytest.raises(FallbackError, match="forward_results"):
        graphs.compile(both)(*packed)
    (record,) = sites()
    assert (record.status, record.reason, record.kind) == ("fallback", Reason.FORWARD_RESULTS, FORWARD_ONLY)

    def unread(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attn(q, k, v, starts, starts, 33, 33, window_size=(-1, 0))

    with capture(strict=True) as graphs:
        graphs.compile(unread)(*packed)
    assert [record.status for record in sites()] == ["replaced"]


def test_flex_attention() -> None:
    inputs = [t.detach().transpose(1, 2) for t in inputs_of("plain", torch.float32)]
    with capture() as graphs:
        graphs.compile(lambda q, k, v: flex_attention(q, k, v))(*inputs)
    assert [(record.status, record.kind) for record in sites()] == [("replaced", FORWARD_ONLY)]


def flash_alone(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Tensor:
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=0.125)[0]


def efficient_alone(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Tensor:
    """Without gradients PyTorch asks for no log-sum-exp."""
    return aten._scaled_dot_product_efficient_attention(q, k, v, None, False, 0.0, True)[0]


def efficient_with_bias(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Tensor:
    bias = torch.full((1, 1, 128, 128), math.pi, dtype=q.dtype, device=q.device)
    return aten._scaled_dot_product_efficient_attention(q, k, v, bias.expand(2, 8, 128, 128), False, 0.0)[0]


def cudnn_alone(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Tensor:
    return aten._scaled_dot_product_cudnn_attention(q, k, v, None, False, 0.0, True)[0]


@pytest.mark.parametrize("alone", [flash_alone, efficient_alone, efficient_with_bias, cudnn_alone])
def test_cuda_operators(alone: Callable[..., Tensor]) -> None:
    graph, record = rewritten(trace(alone, lambda: cuda_inputs(Shape())))
    assert (record.status, record.kind) == ("replaced", FORWARD_ONLY)
    assert record.predicted_us is None
    counts = op_counts(graph)
    assert (counts[FORWARD], [name for name in counts if "scaled_dot_product" in name]) == (1, [])


def test_unread_outputs_of_a_fallback_backward_stay() -> None:
    """A forward whose backward is not replaced is no forward alone."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    inputs = [t.detach().double().transpose(1, 2).requires_grad_() for t in inputs_of("plain", torch.float32)]
    with capture() as graphs:
        graphs.compile(function)(*inputs).sum().backward()
    assert [(record.reason, record.kind) for record in sites()] == [(Reason.DTYPE, FULL)]
    assert graphs.count(CPU_FORWARD) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_a_compiled_function(reentrant: bool) -> None:
    """The first run of a reentrant one is without gradients, the second with them."""
    inputs = inputs_of("plain", torch.float32)
    with capture(strict=True) as graphs:
        compiled = graphs.compile(FUNCTIONS["plain"])
        outputs = checkpoint(compiled, *inputs, use_reentrant=reentrant)
        outputs.sum().backward()
        plain = compiled(*inputs)
    assert torch.equal(outputs, plain)
    assert {record.kind for record in sites()} == ({FULL, FORWARD_ONLY} if reentrant else {FULL})
    assert config.forward == "auto"


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value)


class OutsideOfGraphs(torch.autograd.Function):
    """Attention whose forward is compiled by itself, and whose backward is not."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        compiled: Callable[..., Tensor] = torch.compile(attention)
        return compiled(q, k, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            out = attention(*leaves)
        return torch.autograd.grad(out, leaves, grad)


def test_a_backward_outside_of_graphs_is_told() -> None:
    inputs = [torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3)]
    with capture():
        OutsideOfGraphs.apply(*(2 * t for t in inputs)).sum().backward()
    (record,) = sites()
    assert (record.kind, record.status) == (FORWARD_ONLY, "replaced")
    assert "query wants a gradient and the graph gives none" in record.detail
    with capture(), torch.no_grad():
        torch.compile(attention)(*inputs)
    (record,) = sites()
    assert "wants a gradient" not in record.detail
