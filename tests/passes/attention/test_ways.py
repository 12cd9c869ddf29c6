"""Ways of running a model on the CPU: the records, the bits of two runs from the start, and the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_inductor.records.records import sites

from ...support.cases import some
from ...support.graphs import capture
from ...support.hf_models import build, inputs_of
from ...support.model_table import line
from ...support.ways import WAYS, Way

pytest.importorskip("transformers", reason="the models come from the extra 'hf'")
pytestmark = pytest.mark.usefixtures("deterministic")


def run(way: Way, compile: Callable[..., Any], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    torch._dynamo.reset()
    model = build("Llama")
    with way.step(model, compile) as step:
        step(inputs)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


SOON = [name for name in WAYS if name not in ("dynamic", "static", "fullgraph")]
"""Ways that are tried in every run of the tests: Dynamo takes half a minute for a model of transformers whose sizes are
all symbols, and the graphs of the other two are the same as of "default"."""


@some(WAYS, SOON, "name")
def test_way(name: str) -> None:
    way, inputs = WAYS[name], inputs_of("Llama", "right")
    with capture() as graphs:
        first = run(way, graphs.compile, inputs)
        records = sites()
        second = run(way, graphs.compile, inputs)
    assert line(records, calls=len(records)) == way.expected
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    plain = run(way, lambda function, **options: function, inputs)
    assert first.keys() == plain.keys()
    for key, expected in plain.items():
        assert (first[key] - expected).norm() <= way.tolerance * expected.norm(), key
