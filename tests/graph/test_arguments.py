"""Records name what the model names: its arguments, its modules, and its attention in the order in which it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph

import dash_inductor
from dash_inductor.config import config
from dash_inductor.frontends.all import attentions
from dash_inductor.graph import arguments
from dash_inductor.records.records import SiteRecord, Tensors
from tests.support.graphs import capture

pytestmark = pytest.mark.usefixtures("deterministic")


class Read(Exception):
    """Ends a compile when the joint graph has been read: generating code takes long, and shows nothing here."""


def read(
    function: Callable[..., Any], *args: Any, backwards: list[str] | None = None, **kwargs: Any
) -> list[SiteRecord]:
    """The records of the first graph of a function; `backwards` gets the names of its backwards, as the graph is."""

    def see(graph: Graph) -> None:
        if backwards is not None:
            backwards.extend(found.node.name for found in attentions(graph) if found.has_backward)

    def stop(graph: Graph) -> None:
        raise Read

    torch._dynamo.reset()
    dash_inductor.clear_sites()
    passes: dict[str, Any] = {"joint_custom_pre_pass": see, "joint_custom_post_pass": stop}
    with inductor_config.patch(passes), config.patch(cpu="reference"), contextlib.suppress(Exception):
        torch.compile(function)(*args, **kwargs)
    return list(dash_inductor.sites())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)
        self.register_buffer("window", torch.ones(16, 16).tril())

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.out(F.scaled_dot_product_attention(x, x, x, attn_mask=(mask + self.window - 1) > 0))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, attention_mask)
        return hidden


X = torch.ones(1, 2, 16, 8, requires_grad=True)
MASK = torch.ones(16, 16)


def test_arguments_and_buffers_have_the_models_names_and_layers_its_order() -> None:
    backwards: list[str] = []
    records = read(Model(), X, attention_mask=MASK, backwards=backwards)
    assert [record.module for record in records] == ["layers.0", "layers.1", "layers.2"]
    assert [set(r.inputs) for r in records] == [{"attention_mask", f"self.layers.{i}.window"} for i in range(3)]
    assert all(f"{__file__}:" in record.source for record in records)
    assert [record.name for record in records] == backwards[::-1]  # the graph has them the other way round


def attend(x: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask > 0)


def with_keywords(x: Tensor, **kwargs: Any) -> Tensor:
    return attend(x, kwargs["attention_mask"])


def with_a_structure(x: Tensor, batch: dict[str, list[Tensor]]) -> Tensor:
    return attend(x, batch["masks"][1])


def from_outside(x: Tensor) -> Tensor:
    return attend(x, MASK)


def of_a_computed_mask(x: Tensor, lengths: Tensor) -> Tensor:
    return attend(x, (torch.arange(16) < lengths[:, None]).float()[:, None, None])


def without_a_mask(x: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x) * mask.mean()


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "inputs"),
    [
        (attend, (MASK,), {}, ["mask"]),
        (with_keywords, (), {"attention_mask": MASK}, ["attention_mask"]),
        (with_a_structure, ({"masks": [X, MASK]},), {}, ["batch['masks'][1]"]),
        (from_outside, (), {}, ["MASK"]),
        (of_a_computed_mask, (torch.tensor([3]),), {}, ["lengths"]),
        (without_a_mask, (MASK,), {}, []),
    ],
)
def test_names_of_inputs(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[str]) -> None:
    (record,) = read(function, X, *args, **kwargs)
    assert list(record.inputs) == inputs


def test_sizes_among_the_inputs_shift_no_name() -> None:
    x = torch.ones(3, 2, 16, 8, requires_grad=True)
    for dim in (0, 2):
        torch._dynamo.mark_dynamic(x, dim)

    def scaled(x: Tensor, scale: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x * scale, x, x, attn_mask=mask.expand(x.shape[2], x.shape[2]) > 0)

    (record,) = read(scaled, x, torch.ones(1), torch.ones(1, 1))
    assert record.inputs == ("mask",)
    assert record.tensors == Tensors(*[(None, 2, None, 8)] * 3, "float32", "cpu")
    assert str(record.tensors) == "q, k and v ?x2x?x8, float32"


def test_behind_a_graph_break_a_local_variable_keeps_its_name() -> None:
    def broken(x: Tensor, attention_mask: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return attend(x, attention_mask)

    assert [record.inputs for record in read(broken, X, MASK)] == [("attention_mask",)]


def test_what_dynamo_calls_a_source() -> None:
    assert arguments.in_source("L['self']._modules['layers']._modules['0']._parameters['w']") == "self.layers.0.w"
    assert arguments.in_source("L['kwargs']['mask']") == "mask"
    assert arguments.in_source("G['np'].e") == "np.e"
    assert arguments.in_source("L['___stack1'][0]") == "value 1 of before the graph break[0]"


def test_a_graph_that_dynamo_did_not_capture_has_its_own_names() -> None:
    with capture() as graphs:  # its backend does not call Inductor, which would be given Dynamo's graph
        graphs.compile(attend)(X, MASK)
    (record,) = dash_inductor.sites()
    assert record.inputs == ("primals_1",)


@pytest.fixture
def fallback() -> list[SiteRecord]:
    """Sites that are not replaced, for as many causes as there are records."""
    x = torch.ones(1, 2, 16, 8, dtype=torch.float64, requires_grad=True)
    records = read(attend, x, MASK)

    def dropped(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    return records + read(dropped, X.detach().double().requires_grad_())


def test_what_is_known_of_fallback_sites(fallback: list[SiteRecord]) -> None:
    by_dtype, by_math = fallback
    assert (by_dtype.status, by_dtype.reason and by_dtype.reason.value, by_dtype.site) == ("fallback", "dtype", None)
    assert by_dtype.shape == "q, k and v 1x2x16x8, float64"
    assert (by_dtype.inputs, by_dtype.recognised) == (("mask",), "not read: a tensor 16x16 float64")
    assert (by_math.reason and by_math.reason.value, by_math.shape) == ("math_path", "q, k and v 1x2x16x8, float64")


def test_details_name_the_models_arguments() -> None:
    def added(x: Tensor, relative_position: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=relative_position)

    (record,) = read(added, X, torch.ones(16, 16))
    assert record.detail == "the mask is added as a bias: mask_depends_on_input: input relative_position"
    assert record.recognised == "not recognised: a tensor 16x16 float32, which is added to the scores as it is"


def test_how_a_mask_was_recognised() -> None:
    (record,) = read(of_a_computed_mask, X, torch.tensor([3]))
    assert record.mask == "keys(0)"
    assert record.recognised.startswith("read back through ")
    assert record.recognised.endswith(" elements compared with what the graph computes")
    assert "iota" in record.recognised
