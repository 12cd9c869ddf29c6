"""Calls that only their layout keeps from fused operators: on the CPU with their results, for an H100 as records."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor.config import config
from dash_inductor.frontends import math_backend
from dash_inductor.model.reasons import Reason
from dash_inductor.records.records import sites

from ..support.forks import FAKE_GPU, run_forked
from ..support.graphs import BACKWARD, FORWARD, assert_as_exact, capture, op_counts, step, tensors

pytestmark = pytest.mark.usefixtures("deterministic")

WIDE = (2, 3, 4, 40, 16)
Bias = Callable[[Tensor], Tensor]


def attention(bias: Tensor | None, **options: Any) -> Callable[..., Tensor]:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = bias if bias is None or bias.dtype == torch.bool else bias.to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)

    return function


def check(function: Callable[..., Tensor], inputs: list[Tensor], mask: str, dynamic: tuple[int, ...] = ()) -> None:
    """It is replaced, with this mask in the record, and its results have the shapes and values of eager."""
    for tensor in inputs:
        for dim in dynamic:
            torch._dynamo.mark_dynamic(tensor, dim)
    with capture() as graphs, config.patch(strict=True):
        results = step(graphs.compile(function), inputs)
    assert [(record.status, record.mask) for record in sites()] == [("replaced", mask)]
    assert (graphs.count(FORWARD), graphs.count(BACKWARD)) == (1, 1)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert_as_exact(function, inputs, results, strides=False)


@pytest.mark.parametrize(
    ("size", "bias", "mask"),
    [
        (WIDE, None, "full"),
        ((1, 3, 4, 40, 16), (1, 1, 4, 40, 40), "full + bias"),
        (WIDE, (1, 1, 4, 40, 40), "full + bias"),
        (WIDE, (2, 3, 1, 40, 40), "full + bias"),
        (WIDE, (4, 40, 40), "full + bias"),
        (WIDE, (1, 40, 40), "full + bias"),
        (WIDE, (40, 40), "full + bias"),
        ((1, 3, 4, 40, 16), (3, 4, 40, 40), "full + bias"),
        ((2, 1, 3, 4, 40, 16), (1, 1, 1, 4, 40, 40), "full + bias"),
        ((4, 40, 16), None, "full"),
        ((4, 40, 16), (4, 40, 40), "full + bias"),
        ((4, 40, 16), (1, 40, 40), "full + bias"),
        ((4, 40, 16), (40, 40), "full + bias"),
        ((2, 4, 40, 16), (4, 40, 40), "full + bias"),
    ],
    ids=str,
)
def test_other_numbers_of_dimensions(size: tuple[int, ...], bias: tuple[int, ...] | None, mask: str) -> None:
    given = None if bias is None else torch.randn(bias, generator=torch.Generator().manual_seed(3))
    check(attention(given), tensors(*[size] * 3), mask)


@pytest.mark.parametrize("dynamic", [(0,), (1,), (3,), (0, 3)], ids=str)
def test_dynamic_sizes(dynamic: tuple[int, ...]) -> None:
    check(attention(None), tensors(*[(5, 3, 4, 40, 16)] * 3), "full", dynamic)


def test_other_arguments_stay() -> None:
    check(attention(None, is_causal=True, scale=0.3), tensors(*[WIDE] * 3), "causal")
    grouped = [(2, 3, 4, 40, 16), *[(2, 3, 2, 40, 16)] * 2]
    check(attention(None, enable_gqa=True), tensors(*grouped), "full")


def test_a_mask_of_truth_values_is_read() -> None:
    visible = torch.ones(40, 40, dtype=torch.bool).tril()[None, None, None].expand(2, 3, 1, -1, -1)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, columns = torch.arange(q.shape[3])[:, None], torch.arange(k.shape[3])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(columns <= rows)[None, None, None])

    check(function, tensors(*[WIDE] * 3), "causal")
    check(attention(visible.contiguous()), tensors(*[WIDE] * 3), "dense(0)")


def test_transposed_heads() -> None:
    """[batch, rows, length, heads, head dim], as models have them: the leading dimensions are one all the same."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(*(t.transpose(2, 3) for t in (q, k, v)))
        return out.transpose(2, 3)

    check(function, tensors(*[(2, 3, 40, 4, 16)] * 3), "full")


@pytest.mark.parametrize(
    "bias",
    [(2, 1, 4, 40, 40), (1, 3, 4, 40, 40)],
)
def test_a_bias_that_is_no_view_is_repeated(bias: tuple[int, ...]) -> None:
    """PyTorch's math implementation, which takes it, writes planes that are as large for each head of a row."""
    given = torch.randn(bias)
    inputs = tensors(*[WIDE] * 3)
    with capture() as graphs:
        results = step(graphs.compile(attention(given)), inputs)
    assert [(record.op, record.status) for record in sites()] == [(math_backend.OP, "replaced")]
    assert_as_exact(attention(given), inputs, results)


def test_what_is_no_view_is_replaced_as_attention_by_hand() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(None)(*(t[:, :2] for t in (q, k, v)))

    inputs = tensors(*[WIDE] * 3)
    with capture() as graphs:
        results = step(graphs.compile(function), inputs)
    assert [(record.op, record.status) for record in sites()] == [(math_backend.OP, "replaced")]
    assert_as_exact(function, inputs, results)


def test_nothing_changes_on_a_cpu_that_is_left_alone() -> None:
    with capture(cpu="off") as graphs:
        step(graphs.compile(attention(None)), tensors(*[WIDE] * 3))
    assert [(record.op, record.reason) for record in sites()] == [(math_backend.OP, Reason.CPU_OFF)]


# ---- an H100

PROGRAM = """
    import json

    from tests.frontends.test_fusable import records_of_h100

    print(json.dumps(records_of_h100()))
"""
PLANE = (2, 8, 128, 128)
READ_IN_PLACE = ("contiguous", "heads in the middle", "the same for all keys")
LAYOUTS: dict[str, tuple[tuple[int, ...], Bias]] = {
    "contiguous": (PLANE, lambda b: b),
    "of relative positions": ((128, 128, 8), lambda b: b.permute(2, 0, 1)[None]),
    "of pairs": ((2, 128, 128, 8), lambda b: b.permute(0, 3, 1, 2)),
    "heads in the middle": ((128, 8, 128), lambda b: b.permute(1, 0, 2)[None]),
    "transposed": ((1, 8, 128, 128), lambda b: b.mT),
    "every second key": ((1, 8, 128, 256), lambda b: b[..., ::2]),
    "the same for all keys": ((2, 8, 128, 1), lambda b: b.expand(PLANE)),
    "of three dimensions": ((128, 128, 8), lambda b: b.permute(2, 0, 1)),
    "not aligned": ((100, 100, 8), lambda b: b.permute(2, 0, 1)[None]),
}
"""Biases: what the program has, and what it passes."""


def records_of_h100() -> dict[str, Any]:
    """The fate of each layout, and the contents of its joint graph then; in a process whose CUDA device is a fake."""
    from unittest import mock

    from torch._subclasses.fake_tensor import FakeTensorMode

    import dash_inductor.lowering
    from dash_inductor.records.records import clear_sites

    from ..support.attention_masks import compile_joint_graph

    torch.use_deterministic_algorithms(True)

    def line(function: Callable[..., Tensor], *sizes: tuple[int, ...], gradient: bool = True) -> list[Any]:
        clear_sites()
        with (
            mock.patch.object(dash_inductor.lowering, "compile_kernels"),
            FakeTensorMode(allow_non_fake_inputs=True),
            torch.device("cuda"),
        ):
            made = [torch.empty(size, dtype=torch.bfloat16, requires_grad=True) for size in sizes]
            made[3:] = [tensor.requires_grad_(gradient) for tensor in made[3:]]
            graph = compile_joint_graph(function, **dict(zip("qkvb", made, strict=False)))
        (record,) = sites()
        copies: Counter[str] = op_counts(graph)
        reason = record.reason.value if record.reason else None
        return [record.mask, reason, record.detail, copies["aten::clone"] + copies["aten::constant_pad_nd"]]

    found: dict[str, Any] = {}
    for name, (size, layout) in LAYOUTS.items():
        length = size[0] if name == "not aligned" else 128
        for gradient in (False, True):

            def function(q: Tensor, k: Tensor, v: Tensor, b: Tensor, layout: Bias = layout) -> Tensor:
                return F.scaled_dot_product_attention(q, k, v, attn_mask=layout(b))

            found[f"{name} {gradient}"] = line(function, *[(2, 8, length, 64)] * 3, size, gradient=gradient)

    def pairs(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=b.permute(0, 1, 4, 2, 3))

    def t5(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
        """As transformers 5.17 has it: a table of relative positions, to which a mask is added."""
        columns = torch.arange(128, device=b.device)  # the device of a context is not torch 2.11's
        rows = columns[:, None]
        bias = F.embedding((columns - rows).clamp(-16, 15) + 16, b).permute(2, 0, 1)[None]
        mask = torch.where(columns <= rows, 0.0, torch.finfo(torch.bfloat16).min).to(b.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias + mask)

    def relative(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=b.permute(2, 0, 1)[None])

    with mock.patch("dash_inductor.frontends.fusable.make_fusable", return_value=False):
        found["as it was"] = line(relative, *[(2, 8, 128, 64)] * 3, (128, 128, 8))
    found["five dimensions"] = line(pairs, *[(1, 6, 8, 128, 64)] * 3, (1, 1, 128, 128, 8))
    found["t5"] = line(t5, *[(2, 8, 128, 64)] * 3, (32, 8))
    return found


@pytest.fixture(scope="module")
def on_h100() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run_forked(FAKE_GPU, PROGRAM).stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("gradient", [False, True], ids=["constant", "learned"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_biases_of_all_layouts(name: str, gradient: bool, on_h100: dict[str, Any]) -> None:
    """They are copied once where neighbours along the keys are not neighbours in memory, and never padded."""
    mask, reason, detail, copies = on_h100[f"{name} {gradient}"]
    assert (mask, reason) == ("full + bias", None), detail
    padded = name == "not aligned" and gradient  # by PyTorch, what it sliced off the gradient
    assert copies == (name not in READ_IN_PLACE) + padded


@pytest.mark.parametrize("name", ["five dimensions", "t5"])
def test_biases_of_models(name: str, on_h100: dict[str, Any]) -> None:
    mask, reason, detail, _ = on_h100[name]
    assert (mask, reason) == ("full + bias", None), detail


def test_without_another_layout_pytorch_decomposes_it(on_h100: dict[str, Any]) -> None:
    """The control of the tests above: it is replaced all the same, as attention by hand is."""
    mask, reason, detail, _ = on_h100["as it was"]
    assert (mask, reason) == ("full + bias", None)
    assert detail.startswith("computed by hand")
