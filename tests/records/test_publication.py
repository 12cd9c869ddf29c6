"""Logs, structured traces, profiles, provenance and errors: everything that names a site leads to the model's line."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor, nn
from torch._guards import CompileContext
from torch._logging._internal import trace_log
from torch.fx import Graph, Node

import dash_inductor
from dash_inductor.config import config
from dash_inductor.errors import FallbackError
from dash_inductor.graph.nodes import op_name
from dash_inductor.records.records import GraphRecord

pytestmark = pytest.mark.usefixtures("deterministic")


class Attention(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask > 0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


MASK = torch.ones(16, 16).tril()


class Read(Exception):
    """Ends a compile behind the joint passes."""


def joint_graph(dtype: torch.dtype = torch.float32) -> list[Node]:
    """The nodes of the model's joint graph behind our pass."""
    nodes: list[Node] = []

    def stop(graph: Graph) -> None:
        nodes.extend(graph.nodes)
        raise Read

    with (
        inductor_config.patch(joint_custom_post_pass=stop),
        config.patch(cpu="reference"),
        contextlib.suppress(Exception),
    ):
        torch.compile(Model())(torch.ones(1, 2, 16, 8, dtype=dtype, requires_grad=True), MASK)
    return nodes


@pytest.fixture
def artifacts() -> Iterator[dict[str, list[tuple[str, str]]]]:
    """The artifacts that reach PyTorch's structured trace: the compile and the payload of each, by name."""
    seen: dict[str, list[tuple[str, str]]] = {}

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            name = getattr(record, "metadata", {}).get("artifact", {}).get("name", "")
            # PyTorch's own formatter puts this id into the log, by which tlparse sorts
            compile_id = str(CompileContext.current_trace_id())
            seen.setdefault(name, []).append((compile_id, str(getattr(record, "payload", ""))))

    handler, level = Handler(), trace_log.level
    trace_log.addHandler(handler)
    trace_log.setLevel(logging.DEBUG)
    yield seen
    trace_log.removeHandler(handler)
    trace_log.setLevel(level)


def test_the_structured_trace_has_graphs_and_sites_under_their_compile(artifacts: Any) -> None:
    joint_graph()
    ((compile_id, before),) = artifacts["dash_graph_before"]
    ((after_id, after),) = artifacts["dash_graph_after"]
    ((sites_id, sites),) = artifacts["dash_sites"]
    assert compile_id == after_id == sites_id == "0/0"
    assert "_scaled_dot_product_flash_attention_for_cpu_backward" in before
    assert "dash_inductor.attention_backward" not in before
    assert after.count("torch.ops.dash_inductor.attention_backward.default(") == 2
    assert GraphRecord.from_json(sites) == dash_inductor.graphs()[0]


def test_a_graph_that_stays_has_no_second_picture(artifacts: Any) -> None:
    joint_graph(torch.float64)
    assert len(artifacts["dash_graph_before"]) == 1
    assert "dash_graph_after" not in artifacts


def test_one_line_a_site_and_the_steps_below(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="dash_inductor"):
        joint_graph()
    ours = [record for record in caplog.records if record.name == "dash_inductor"]
    info = [record.getMessage() for record in ours if record.levelno == logging.INFO]
    steps = "\n".join(record.getMessage() for record in ours if record.levelno == logging.DEBUG)
    assert info == [str(site) for site in dash_inductor.sites()]
    assert "aten.gt.Scalar read as data" in steps
    assert "mask_1" not in steps  # both layers have one mask, which is read once
    assert steps.count("backward of aten::_scaled_dot_product_flash_attention_for_cpu") == 2
    assert "planned for cpu: reference/two_pass" in steps


def test_nodes_lead_to_the_model() -> None:
    ours = {node.name: node for node in joint_graph() if op_name(node).startswith("dash_inductor::attention")}
    forwards, backwards = ([f"dash_{kind}_layers_{i}" for i in range(2)] for kind in ("forward", "backward"))
    assert [*ours] == forwards + backwards[::-1]
    records = {site.module: site for site in dash_inductor.sites()}
    for name, node in ours.items():
        module = f"layers.{name[-1]}"
        assert node.args[-1] == f"{records[module].name} in {module}"
        assert __file__ in node.meta["stack_trace"]
    # PyTorch notes the node of Dynamo's graph in the forward alone
    sources = [[ours[name].meta["from_node"][0].name for name in names] for names in (forwards, backwards)]
    assert sources[0] == sources[1]
    assert len(set(sources[0])) == 2


@pytest.mark.parametrize("profiled", [True, False])
def test_a_profile_names_the_site(profiled: bool) -> None:
    q = torch.ones(1, 2, 16, 8)
    plan = "reference/two_pass/dkdv=64x64w1s1/dq=64x64w1s1/head_chunk=4/forward=reference/fwd=64x64w1s1"
    with torch.profiler.profile() if profiled else contextlib.nullcontext() as profile:
        torch.ops.dash_inductor.attention_forward(
            q, q, q, [], "causal/scale=0.5/orders=0123", plan, "attend in layers.0"
        )
    names = {event.name for event in profile.events()} if profile else set()
    assert ("dash_inductor attend in layers.0" in names) == profiled


@pytest.mark.parametrize("verbose", [False, True])
def test_a_fallback_sites_error_is_itself_and_short(verbose: bool) -> None:
    """The error that a user sees and an `except` clause may name; TORCHDYNAMO_VERBOSE=1 shows all frames."""
    model = torch.compile(Model())
    x = torch.ones(1, 2, 16, 8, dtype=torch.float64, requires_grad=True)
    with (
        config.patch(cpu="reference", strict=True),
        dynamo_config.patch(verbose=verbose),
        pytest.raises(FallbackError) as raised,
    ):
        model(x, MASK)
    lines = "".join(traceback.format_exception(raised.value)).splitlines()
    message = next(
        i for i, line in enumerate(lines) if line.startswith("dash_inductor.errors.FallbackError: strict is")
    )
    assert (message < 25) != verbose
    assert (len(lines) < 50) != verbose
    assert [line.rpartition(" in ")[2] for line in lines[message + 1 : message + 3]] == ["layers.0", "layers.1"]
