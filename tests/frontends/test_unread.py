"""No attention is without a record, however it is written; and nothing else has one."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.fx import Graph

from dash_inductor.frontends import unread
from dash_inductor.frontends.unread.net import OP
from dash_inductor.model.reasons import Reason
from dash_inductor.records.records import FORWARD_ONLY, FULL, sites

from ..support.graphs import capture, trace
from .unread_programs import ATTENTION, MATRIX, OTHERS, QKV, Unread

pytestmark = pytest.mark.usefixtures("deterministic")
KINDS = ["training", "inference", "dynamic", "value alone"]


def records(function: Any, shapes: Any, kind: str) -> list[Any]:
    wants = {"training": True, "dynamic": True, "inference": False}
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(shape, generator=generator).requires_grad_(wants.get(kind, place == 2))
        for place, shape in enumerate(shapes)
    ]
    with capture() as graphs, torch.set_grad_enabled(kind != "inference"):
        graphs.compile(function, dynamic=kind == "dynamic" or None)(*tensors)
    return list(sites())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unread", ATTENTION.values(), ids=ATTENTION)
def test_attention(unread: Unread, kind: str) -> None:
    """One record of each, whether a reader of softmaxes or the net leaves it."""
    (record,) = records(unread.function, unread.shapes, kind)
    assert (record.status, record.reason) == ("fallback", Reason.UNSUPPORTED_OP), record.detail
    assert record.kind == (FORWARD_ONLY if kind == "inference" else FULL) or record.op != OP
    assert unread.words in record.detail


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("function", OTHERS.values(), ids=OTHERS)
def test_what_is_no_attention(function: Any, kind: str) -> None:
    assert records(function, MATRIX, kind) == []


@pytest.mark.parametrize("q_len", [24, 0])
def test_no_keys(q_len: int) -> None:
    """Views of tensors without elements are followed, too."""

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT / 4).log_softmax(-1).exp() @ v

    (record,) = records(function, [(2, 4, q_len, 16), *[(2, 4, 0, 16)] * 2], "training")
    assert record.reason == Reason.UNSUPPORTED_OP, record.detail


def test_a_gradient_of_a_loss() -> None:
    """As losses that compute it in the forward have it: what is expected is subtracted from the softmax."""

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        expected = torch.nn.functional.one_hot(torch.arange(x.shape[0]) % 7, 7)
        return ((x @ weight).softmax(-1) - expected) @ weight.mT

    graph = trace(function, lambda: [torch.empty(shape) for shape in MATRIX]).graph
    assert list(unread.find(graph, set())) == []


def whole(softmax: str) -> Graph:
    """An attention whose softmax is one operator, as graphs have it before they are decomposed."""
    operator = getattr(torch.ops.aten, softmax)

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.ops.aten.matmul(q, k.mT)
        weights = operator(scores, -1) if softmax == "_safe_softmax" else operator(scores, -1, False)
        return torch.einsum("bhij,bhjd->bhid", weights.exp() if "log" in softmax else weights, v)

    return trace(function, lambda: [torch.empty(shape) for shape in QKV]).graph


@pytest.mark.parametrize("softmax", ["_softmax", "_safe_softmax", "_log_softmax"])
def test_undecomposed_softmaxes(softmax: str) -> None:
    graph = whole(softmax)
    (refusal,) = unread.find(graph, set())
    assert not refusal.has_backward


@pytest.mark.parametrize("known", ["normaliser", "second"])
def test_what_is_known_is_found_once(known: str) -> None:
    graph = whole("_softmax")
    (refusal,) = unread.find(graph, set())
    node = refusal.node if known == "normaliser" else refusal.place
    assert node is not None
    assert list(unread.find(graph, {node})) == []


def deep(layers: int) -> Graph:
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for _ in range(layers):
            weights = (x @ weight @ x.mT).exp()
            x = x + (weights / (1 + weights.sum(-1, keepdim=True))) @ x
        return x

    return trace(function, lambda: [torch.empty(2, 8, 4), torch.empty(4, 4)]).graph


def test_time_is_linear_in_the_graph() -> None:
    seconds = []
    for layers in (20, 160):
        graph = deep(layers)
        start = time.process_time()
        assert len(list(unread.find(graph, set()))) == layers
        seconds.append(time.process_time() - start)
    assert seconds[1] < 8 * 4 * seconds[0]
