"""Causal language models of `transformers`, given only `input_ids` and labels: no mask, no repeated head remains."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dash_inductor.config import config
from dash_inductor.observe.records import sites

from .support.graphs import BACKWARD, CPU_BACKWARD, CPU_FORWARD, FORWARD, capture

transformers = pytest.importorskip("transformers", reason="the models come from the extra 'hf'")
pytestmark = pytest.mark.usefixtures("deterministic")

LENGTH, WINDOW, LAYERS = 72, 20, 2
SIZES: dict[str, Any] = {
    "vocab_size": 61,  # below LENGTH, as all sizes are: only an attention mask has LENGTH x LENGTH elements
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MODELS = {
    "Llama": ({}, "causal"),
    "Qwen3": ({}, "causal"),
    "Mistral": ({"sliding_window": WINDOW}, f"band(0,{WINDOW - 1})"),
}


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    settings = getattr(transformers, f"{family}Config")(**SIZES, **MODELS[family][0])
    return getattr(transformers, f"{family}ForCausalLM")(settings)


def gradients(model: Any, run: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    run(input_ids=ids, labels=ids).loss.backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("family", MODELS)
def test_causal_language_model(family: str) -> None:
    model, ids = model_of(family), torch.randint(0, 61, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    with capture(plane_length=LENGTH) as graphs, config.patch(strict=True):
        compiled = graphs.compile(model)
        first, second = gradients(model, compiled, ids), gradients(model, compiled, ids)
    assert (graphs.count_before(CPU_FORWARD), graphs.count_before(CPU_BACKWARD)) == (LAYERS, LAYERS)
    assert (graphs.count(CPU_FORWARD), graphs.count(CPU_BACKWARD)) == (0, 0)
    assert (graphs.count(FORWARD), graphs.count(BACKWARD)) == (LAYERS, LAYERS)
    assert graphs.planes == []
    assert [(r.mask, r.site.group) for r in sites() if r.site] == [(MODELS[family][1], 2)] * LAYERS
    assert {r.source.rsplit(" in ", 1)[-1] for r in sites()} == {f"model.layers.{i}.self_attn" for i in range(LAYERS)}
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    eager = gradients(model, model, ids)
    exact = gradients(model.double(), model, ids)
    for ours, theirs, true in zip(first, eager, exact, strict=True):
        floor = 8 * torch.finfo(torch.float32).eps * true.abs().max()
        assert (ours - true).abs().max() <= 2 * (theirs - true).abs().max() + floor
