"""Masks that are no bands: read as data, or not replaced, each with its reason; and the check of real values behind it
all.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dash_inductor.masks import recognition
from dash_inductor.masks.recognition import recognise
from dash_inductor.model.mask import Band

from ..support.mask_graphs import assert_components_are_the_mask, read_as, read_graph, read_mask, trace_mask

LOWEST = torch.finfo(torch.float32).min


def rows(q: Tensor) -> Tensor:
    return torch.arange(q.shape[2]).unsqueeze(1)


def columns(k: Tensor) -> Tensor:
    return torch.arange(k.shape[2]).unsqueeze(0)


def causal(q, k):
    return columns(k) <= rows(q)


def additive(visible, value=-math.inf):
    return torch.where(visible, 0.0, value)


# Masks that no input reaches, and that are no band


def one_element_more(q, k):
    return causal(q, k) ^ ((rows(q) == 3) & (columns(k) == 5))


def one_element_written(q, k):
    mask = causal(q, k)
    mask[3, 5] = True
    return mask


def some_columns_written(q, k):
    mask = causal(q, k)
    mask[:, :4] = True
    return mask


def alibi(q, k):
    slopes = torch.full((q.shape[1], 1, 1), 0.25)
    return additive(causal(q, k)) + slopes * (columns(k) - rows(q))


def prefix(q, k):
    return causal(q, k) | (columns(k) < 4)


def first_token_hidden(q, k):
    return causal(q, k) & (columns(k) > 0)


def dilated(q, k):
    return (rows(q) - columns(k)) % 2 == 0


def two_bands(q, k):
    distance = rows(q) - columns(k)
    return ((distance >= 0) & (distance < 3)) | ((distance >= 6) & (distance < 9))


def by_batch_entry(q, k):
    return columns(k) - rows(q) <= torch.arange(q.shape[0])[:, None, None, None]


def by_head(q, k):
    return columns(k) - rows(q) <= torch.arange(q.shape[1])[None, :, None, None]


def nothing(q, k):
    return columns(k) < 0 * rows(q)


def other_slope(q, k):
    return 2 * columns(k) <= rows(q)


def soft(q, k):
    return additive(causal(q, k), -10000.0)


def shifted(q, k):
    return additive(causal(q, k)) + 1.0


def not_a_number(q, k):
    return torch.where(causal(q, k), 0.0, math.nan)


def two_documents(q, k):
    number = torch.where(torch.arange(q.shape[2]) < 7, 0, 1)
    return causal(q, k) & (number[:, None] == number[None, :])


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("make", "mask"),
    [
        (one_element_more, "dense"),
        (one_element_written, "dense"),
        (some_columns_written, "interval"),
        (prefix, "interval"),
        (first_token_hidden, "causal & keys"),
        (two_documents, "causal & segments"),
        (dilated, "dilated"),
        (two_bands, "dense"),
        (by_batch_entry, "dense"),
        (by_head, "head_interval"),
        (nothing, "dense"),
        (other_slope, "dense"),
    ],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_what_positions_decide_otherwise_is_read_as_data(make, mask, dynamic) -> None:
    """As little of it as possible: the graph's own tensor of the keys, of numbers of tokens, or of all pairs."""
    module = trace_mask(make, dynamic=dynamic)
    found = read_graph(module)
    assert (str(found.components), found.reason) == (mask, None)
    assert found.components is not None
    for batch, length in ((3, 20), (2, 33), (5, 9)) if dynamic else ((3, 20),):
        q = torch.zeros(batch, 2, length, 4)
        assert_components_are_the_mask(module, found.components, q, q)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("make", [alibi, soft, shifted, not_a_number], ids=lambda f: f.__name__)
def test_what_is_added_is_no_mask(make, dynamic) -> None:
    found = read_mask(make, dynamic=dynamic)
    assert (found.band, found.reason) == (None, "not_a_band")
    assert found.detail


def test_chunks_longer_than_the_sequence_are_no_chunks() -> None:
    found = read_mask(lambda q, k: causal(q, k) & (rows(q) // 64 == columns(k) // 64))
    assert found == read_as(Band(0, None))


def test_rounded_positions_are_not_trusted() -> None:
    def half_precision(q, k):
        return columns(k).to(torch.bfloat16) <= rows(q).to(torch.bfloat16)

    assert read_mask(half_precision) == read_as(Band(0, None))  # up to 256 the type is exact
    assert str(read_mask(half_precision, q_len=600, kv_len=600).components) == "dense"
    assert str(read_mask(half_precision, dynamic=True).components) == "dense"


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_rows_without_a_key_need_infinity(dynamic) -> None:
    """A row of equal finite values is a uniform softmax over keys that the band would hide."""

    def bottom_right(value):
        return lambda q, k: additive(columns(k) <= rows(q) + (k.shape[2] - q.shape[2]), value)

    sizes = {"q_len": 12, "kv_len": 8, "dynamic": dynamic}
    assert read_mask(bottom_right(-math.inf), **sizes).band == (
        Band(0, None, "bottom_right") if dynamic else Band(4, None)
    )
    assert read_mask(bottom_right(LOWEST), **sizes).reason == "not_a_band"
    assert read_mask(lambda q, k: additive(causal(q, k), LOWEST), dynamic=dynamic).band == Band(0, None)


# Masks from data


def padded_batch(q, k, attention_mask):
    return additive(causal(q, k) & attention_mask.bool()[:, None, None, :], LOWEST)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("make", [padded_batch])
def test_depends_on_input(make, dynamic) -> None:
    found = read_mask(make, torch.ones(3, 20, dtype=torch.int64), dynamic=dynamic)
    assert (found.band, found.reason) == (None, "depends_on_input")
    assert "which is data" in found.detail


def test_shapes_and_types_of_inputs_are_no_data() -> None:
    found = read_mask(lambda q, k: q.new_ones(20, 20).tril().bool() & torch.ones_like(q[0, 0, :, :1]).bool())
    assert found == read_as(Band(0, None))


# Operators without a rule


def test_unknown_operator_is_named() -> None:
    found = read_mask(lambda q, k: torch.sin(rows(q).float()) - columns(k))
    assert (found.reason, "aten.sin" in found.detail) == ("unknown_op", True)


def test_a_mask_that_is_written_in_place_is_not_read() -> None:
    def make(q, k):
        mask = torch.zeros(20, 20)
        mask[2:] += 1.0
        return mask

    found = read_graph(make_fx(make, {}, "fake")(torch.zeros(3, 2, 20, 4), torch.zeros(3, 2, 20, 4)))
    assert (found.reason, "writes to" in found.detail) == ("unknown_op", True)


def test_a_mask_of_another_shape_is_refused() -> None:
    assert read_mask(lambda q, k: torch.ones(q.shape[2], k.shape[2] + 1)).reason == "not_a_band"


# The check of real values


def window(q, k):
    return causal(q, k) & (columns(k) > rows(q) - 7)


@pytest.mark.parametrize(
    "sizes",
    [{}, {"dynamic": True}, {"q_len": 4096, "kv_len": 4096}, {"q_len": 5000, "kv_len": 5000, "dynamic": True}],
    ids=["short", "dynamic", "long", "long dynamic"],
)
@pytest.mark.parametrize(("make", "op", "wrong"), [(causal, "le", "lt"), (window, "gt", "ge")])
def test_a_wrong_rule_is_caught(make, op, wrong, sizes, monkeypatch) -> None:
    """The values come from the graph's own operators, so they contradict whatever the interpretation gets wrong."""
    monkeypatch.setitem(recognition.RULES, f"aten::{op}", recognition.RULES[f"aten::{wrong}"])
    found = read_mask(make, **sizes)
    assert (found.band, found.reason) == (None, "value_mismatch")
    assert "differs from" in found.detail


def test_what_cannot_be_checked_is_not_replaced() -> None:
    """A flipped mask of 32768 x 32768 elements is not cut into windows."""
    found = read_mask(lambda q, k: torch.ones(q.shape[2], k.shape[2]).flip(0) > 0, q_len=32768, kv_len=32768)
    assert (found.reason, "too large" in found.detail) == ("value_mismatch", True)


# Work


def test_copies_of_a_mask_are_read_once(monkeypatch) -> None:
    calls = []
    real = recognition._read
    monkeypatch.setattr(recognition, "_read", lambda *args: calls.append(args) or real(*args))

    def three_layers(q, k):
        first, second, third = (additive(causal(q, k) if i < 2 else window(q, k)) for i in range(3))
        return torch.stack([first, second, third])

    module = trace_mask(three_layers)
    query, key = (node for node in module.graph.nodes if node.op == "placeholder")
    layers = [node for node in module.graph.nodes if "where" in node.name]
    assert len(layers) == 3
    found = [recognise(layer, query=query, key=key) for layer in layers]
    assert [result.band for result in found] == [Band(0, None), Band(0, None), Band(0, 6)]
    assert len(calls) == 2


def test_an_active_fake_mode_is_no_obstacle() -> None:
    module = trace_mask(causal)
    with FakeTensorMode():
        assert read_graph(module) == read_as(Band(0, None))
