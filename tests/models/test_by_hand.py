"""Models of transformers that compute attention by hand: all of it is replaced, and gradients are accurate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dash_inductor.frontends.decomposed.frontend import OP
from dash_inductor.model.reasons import Reason
from dash_inductor.records.records import sites

from ..support.graphs import capture
from ..support.hf_models import build, inputs_of, padding
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


@pytest.mark.parametrize("heads", [4, 6])
def test_alibi_beside_the_lowest_number(heads: int) -> None:
    """MPT: a bias of positions, and scores of hidden keys that become the lowest number."""
    from transformers import MptConfig, MptForCausalLM

    config = MptConfig(d_model=16 * heads, n_heads=heads, n_layers=2, vocab_size=97, max_seq_len=128, expansion_ratio=2)
    config.use_cache = False
    model = MptForCausalLM(config).eval()
    tokens = torch.randint(0, 97, (2, 40))
    inputs = {"input_ids": tokens, "labels": tokens}
    run, found = trained(model, inputs)
    assert [(record.op, record.mask) for record in sites()] == [(OP, "causal + bias")] * 2, [
        record.detail for record in sites()
    ]
    check_accuracy(model, run, found, inputs)


def test_padding_may_hide_all_keys_by_the_lowest_number() -> None:
    """Then MPT spreads the probabilities of such a query over all keys: it is kept, and the record says so."""
    from transformers import MptConfig, MptForCausalLM

    config = MptConfig(d_model=64, n_heads=4, n_layers=1, vocab_size=97, max_seq_len=128, expansion_ratio=2)
    tokens = torch.randint(0, 97, (2, 40))
    with capture() as graphs:
        graphs.compile(MptForCausalLM(config))(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    (record,) = sites()
    assert record.reason is Reason.MASK_DEPENDS_ON_INPUT
    assert "may hide all keys of a query by a finite value" in record.detail


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_relative_positions_of_transformer_xl(segments: bool, padded: bool) -> None:
    """XLNet: the bias is a product of query and positions; a product with segments is added to it, or 0."""
    from transformers import XLNetConfig, XLNetLMHeadModel

    model = XLNetLMHeadModel(XLNetConfig(vocab_size=97, d_model=32, n_layer=2, n_head=2, d_inner=32)).eval()
    tokens = torch.randint(0, 97, (2, 24))
    inputs = {"input_ids": tokens, "labels": tokens}
    if segments:
        inputs["token_type_ids"] = (torch.arange(24) > 9).long().expand(2, -1)
    if padded:
        inputs["attention_mask"] = padding("left", 2, 24).long()
    run, found = trained(model, inputs)
    assert [(record.op, record.mask) for record in sites()] == [(OP, "full + bias")] * 2, [
        record.detail for record in sites()
    ]
    check_accuracy(model, run, found, inputs)


@pytest.mark.parametrize("kind", ["local", "transient-global"])
@pytest.mark.parametrize("padded", [False, True])
def test_local_blocks(kind: str, padded: bool) -> None:
    """LongT5's encoder: each block of queries is a batch element, with the keys of three blocks and a learned bias."""
    from transformers import LongT5Config
    from transformers.models.longt5.modeling_longt5 import LongT5EncoderModel

    config = LongT5Config(
        d_model=64, d_kv=16, num_heads=4, num_layers=2, d_ff=32, vocab_size=97, local_radius=7, global_block_size=4,
        encoder_attention_type=kind, dropout_rate=0.0,
    )  # fmt: skip
    model = LongT5EncoderModel(config)
    tokens = torch.randint(2, 97, (2, 40))
    valid = torch.ones_like(tokens)
    valid[1, 30:] = not padded
    inputs = {"input_ids": tokens, "attention_mask": valid}

    def loss(run: Any) -> torch.Tensor:
        state = run(**inputs).last_hidden_state
        weights = torch.randn(state.shape, generator=torch.Generator().manual_seed(0)) * valid[..., None]
        return (state * weights).sum()

    def gradients_of(run: Any) -> list[torch.Tensor]:
        model.zero_grad()
        loss(run).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    with capture() as graphs:
        found = gradients_of(graphs.compile(model))
    assert [(record.op, record.status) for record in sites()] == [(OP, "replaced")] * 2, [
        record.detail for record in sites()
    ]
    assert all(record.mask == "full + bias" for record in sites())
    theirs = gradients_of(model)
    model.double()
    exact = gradients_of(model)
    for ours, eager, true in zip(found, theirs, exact, strict=True):
        floor = 8 * torch.finfo(torch.float32).eps * true.abs().max()
        assert (ours - true).abs().max() <= 2 * (eager - true).abs().max() + floor
