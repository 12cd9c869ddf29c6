"""Models of transformers that compute attention by hand: all of it is replaced, and gradients are accurate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dash_inductor.frontends.decomposed.frontend import OP
from dash_inductor.model.reasons import Reason
from dash_inductor.records.records import sites

from ..support.graphs import capture
from ..support.hf_models import build, inputs_of
from ..support.model_table import check_accuracy, gradients

pytest.importorskip("transformers", reason="the models come from the extra 'hf'")
pytestmark = pytest.mark.usefixtures("deterministic")

EAGER = [("Bert", "right", 2), ("Bart", "plain", 6), ("Llama", "plain", 2)]
"""Families with the implementation that transformers calls eager, and how many attentions they have."""


def trained(model: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """The compiled model, and its gradients."""
    with capture() as graphs:
        run = graphs.compile(model)
        return run, gradients(model, run, inputs)


@pytest.mark.parametrize(("family", "kind", "count"), EAGER)
def test_eager_implementations(family: str, kind: str, count: int) -> None:
    model = build(family).eval()
    model.set_attn_implementation("eager")  # type: ignore[operator]
    inputs = inputs_of(family, kind)
    run, found = trained(model, inputs)
    assert [(record.op, record.status) for record in sites()] == [(OP, "replaced")] * count, [
        record.detail for record in sites()
    ]
    check_accuracy(model, run, found, inputs)


@pytest.mark.parametrize(("family", "noted"), [("GptOss", "with sinks"), ("Gemma2", "repeat each head 2 times")])
def test_their_only_implementation(family: str, noted: str) -> None:
    model = build(family).eval()
    inputs = inputs_of(family, "plain")
    run, found = trained(model, inputs)
    assert [record.mask for record in sites()] == ["band(0,7)", "causal"], [record.detail for record in sites()]
    assert all(noted in record.detail for record in sites())
    assert all("softcap" in str(record.site and record.site.spec) for record in sites()) == (family == "Gemma2")
    check_accuracy(model, run, found, inputs)


def test_attention_weights_in_the_output_keep_it() -> None:
    model = build("Bert", output_attentions=True).eval()
    model.set_attn_implementation("eager")  # type: ignore[operator]
    with capture() as graphs:
        result = graphs.compile(model)(**inputs_of("Bert", "plain"))
        assert result.attentions
    assert {record.reason for record in sites()} == {Reason.PROBABILITIES_USED}
