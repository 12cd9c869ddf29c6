"""Attention that PyTorch decomposes and that is not matched: one record per call, with the cause.

Calls that are matched are replaced: see `test_by_hand`.  Here no softmax is matched, unless a test says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import dash_inductor
from dash_inductor.config import config
from dash_inductor.errors import FallbackError
from dash_inductor.model.reasons import Reason
from dash_inductor.records.records import FORWARD_ONLY, sites

from ..support.graphs import CPU_BACKWARD, JointGraphs, capture, tensors

pytestmark = pytest.mark.usefixtures("deterministic", "unmatched")


@pytest.fixture
def unmatched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dash_inductor.frontends.decomposed.frontend._softmaxes", lambda graph: iter(()))


QKV = [(2, 4, 8, 16)] * 3
OF_QKV = "on cpu [2, 4, 8, 16] with strides [512, 128, 16, 1]"
Function = Callable[..., Tensor]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def by_choice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


def shared_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.vmap(lambda q: F.scaled_dot_product_attention(q, k, v))(q)


def hand_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout((q @ k.mT * 0.3 + 1).softmax(-1), 0.1) @ v


def compiled(function: Function, inputs: list[Tensor], **settings: Any) -> JointGraphs:
    with capture(**settings) as graphs:
        graphs.compile(function)(*inputs).sum().backward()
    return graphs


@pytest.mark.parametrize(
    ("function", "shapes", "dtype", "facts"),
    [
        (dropout, QKV, torch.float32, ["float32 on cpu", "dropout"]),
        (dropout, QKV, torch.bfloat16, [f"called with query bfloat16 {OF_QKV}, key bfloat16 {OF_QKV}", "dropout"]),
        (
            biased,
            [*QKV, (4, 8, 8)],
            torch.bfloat16,
            ["a mask that needs a gradient", "mask bfloat16 on cpu [1, 4, 8, 8]"],
        ),
        (dropout, QKV, torch.float64, ["float64 on cpu", "dropout"]),
        (plain, [(4, 8, 16)] * 3, torch.float32, ["3 dimensions instead of 4"]),
        (shared_keys, [QKV[0], *[(4, 8, 16)] * 2], torch.float32, ["3 dimensions instead of 4"]),
        (plain, [*QKV[:2], (2, 4, 8, 24)], torch.float32, ["head dimension 16, of value 24"]),
        (grouped, [QKV[0], (2, 2, 8, 16), (2, 2, 8, 24)], torch.float32, ["grouped heads", "of value 24"]),
        (biased, [*QKV, (2, 4, 8, 8)], torch.float32, ["a mask that needs a gradient", "float32 on cpu [2, 4, 8, 8]"]),
        (by_choice, QKV, torch.float32, ["no condition", "SDPBackend.MATH has asked for it", "float32 on cpu"]),
    ],
)
def test_every_call_has_a_record(function: Function, shapes: list[Any], dtype: torch.dtype, facts: list[str]) -> None:
    """Newer versions of PyTorch fuse inputs of three dimensions: then there is an ordinary record."""
    graphs = compiled(function, tensors(*shapes, dtype=dtype))
    (record,) = sites()
    if graphs.count_before(CPU_BACKWARD):
        assert len(shapes[0]) == 3
        assert record.status == "replaced"
        return
    assert (record.status, record.reason, record.forward) == ("fallback", Reason.MATH_PATH, "not replaced")
    assert record.op == "aten::_scaled_dot_product_attention_math"
    assert all(fact in record.detail for fact in facts), record.detail
    assert record.source.startswith(f"{__file__}:{function.__code__.co_firstlineno + 1}") or function is by_choice


def test_only_what_failed_is_named() -> None:
    """A mask of truth values needs no gradient, and heads of other types are told as they are."""

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        visible = torch.ones(8, 8, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, dropout_p=0.1)

    compiled(masked, tensors(*QKV))
    (record,) = sites()
    assert record.detail.startswith("dropout, which the fused operator of the CPU does not have; called with query")
    assert record.detail.endswith(", mask bool on cpu [8, 8] with strides [8, 1]")
    assert record.tensors is not None
    assert (record.tensors.query, record.tensors.dtype) == ((2, 4, 8, 16), "float32")


def test_only_the_value_needs_a_gradient() -> None:
    q, k, v = tensors(*QKV)
    graphs = compiled(dropout, [q.detach(), k.detach(), v])
    assert [r.reason for r in sites()] == [Reason.MATH_PATH]
    with dash_inductor.disabled():
        assert graphs.texts == compiled(dropout, [q.detach(), k.detach(), v]).texts


def test_one_record_per_call() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for _ in range(2):
            q = dropout(q, k, v)
        for _ in range(2):
            q = checkpoint(dropout, q, k, v, use_reentrant=False)
        return hand_written(plain(q, k, v), k, v)

    compiled(model, tensors(*QKV))
    reasons = [*[Reason.MATH_PATH] * 4, None, Reason.UNSUPPORTED_OP]  # as the forward runs them, the last one by hand
    assert [r.reason for r in sites()] == reasons
    assert len({r.name for r in sites()}) == 6


def test_a_library_module_that_calls_it() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, dropout=0.1)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    compiled(Model(), tensors((8, 2, 16)))
    (record,) = sites()
    assert record.reason is Reason.MATH_PATH
    assert "dropout" in record.detail
    assert record.source.endswith("in attention")


def test_inference_has_a_record_of_its_own() -> None:
    with capture() as graphs, torch.no_grad():
        graphs.compile(dropout)(*tensors(*QKV))
    assert [(record.reason, record.kind) for record in sites()] == [(Reason.MATH_PATH, FORWARD_ONLY)]


@pytest.mark.parametrize("cpu", ["off", "reference"])
def test_strict_counts_it_as_any_other_site_of_its_device(cpu: str) -> None:
    if cpu == "off":
        compiled(dropout, tensors(*QKV), cpu=cpu, strict=True)
    else:
        with pytest.raises(FallbackError, match=r"math_path: .*dropout"):
            compiled(dropout, tensors(*QKV), cpu=cpu, strict=True)
    assert [r.reason for r in sites()] == [Reason.MATH_PATH]
    assert config.strict is False
