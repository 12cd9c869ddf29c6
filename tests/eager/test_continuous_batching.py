"""Continuous batching of transformers, whose requests share one cache of blocks, with dash_inductor's attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dash_inductor
from dash_inductor import config, sites
from dash_inductor.eager.registration import NAME
from dash_inductor.records.records import clear_sites

from ..support.hf_models import build

transformers = pytest.importorskip("transformers", reason="the models come from the extra 'hf'")
pytest.importorskip("transformers.generation.continuous_batching", reason="this version has no continuous batching")

LONG = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5] * 3
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9, 8, 7], LONG]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Both names have transformers' own functions afterwards."""
    dash_inductor.register()
    interface = transformers.AttentionInterface
    before = {name: interface()[name] for name in ("sdpa", "paged|eager")}
    with config.patch(cpu="reference", strict=True):
        yield
    for name, function in before.items():
        interface.register(name, function)


def model_of(family: str, implementation: str) -> Any:
    torch.manual_seed(0)
    model: Any = build(family, use_cache=True).eval()
    model.set_attn_implementation(implementation)
    return model


def generated(model: Any) -> list[list[int]]:
    """The tokens of each request."""
    greedy = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1)
    cache = transformers.ContinuousBatchingConfig(
        page_size=16, num_blocks=32, max_batch_tokens=64, auto_switch_to_flash=False
    )
    found = model.generate_batch(PROMPTS, greedy, cache)
    return [request.generated_tokens for _, request in sorted(found.items())]


@pytest.mark.parametrize(
    ("family", "name"), [("Llama", "sdpa"), ("Mistral", "sdpa"), ("Qwen3", "sdpa"), ("GptOss", "paged|eager")]
)
def test_tokens(family: str, name: str) -> None:
    """In place of the name that transformers takes there: grouped heads, short windows, sinks."""
    model = model_of(family, name)
    expected = generated(model)
    assert not sites()
    transformers.AttentionInterface.register(name, transformers.AttentionInterface()[NAME])
    assert generated(model) == expected
    assert {record.status for record in sites()} == {"replaced"}
    clear_sites()
    assert generated(model) == expected
    assert not sites(), "it has compiled again"


@pytest.mark.parametrize("name", [NAME, f"paged|{NAME}"])
def test_the_own_name_is_refused_by_transformers(name: str) -> None:
    """It has a list of names that it takes, and says which."""
    model = model_of("Llama", name)
    with pytest.raises(ValueError, match=f"{NAME} is not supported for continuous batching. Use 'paged.eager', 'sdpa'"):
        generated(model)
