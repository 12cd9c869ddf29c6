"""Greedy generation by a small model of transformers, whose logits are compared with those of one forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import dash_inductor
from dash_inductor.eager.registration import NAME

from .hf_models import KV_HEADS, VOCABULARY, build
from .kv_caches import PagedGeneration, in_equal_chunks

LAYERS, DIM = 2, 64
PAGED = "paged_generation"


def model_of(device: str) -> Any:
    """A Llama in bfloat16, with dash_inductor's attention."""
    dash_inductor.register()
    model: Any = build("Llama", layers=LAYERS, head_dim=DIM, attn_implementation=NAME).to(device, torch.bfloat16)
    in_equal_chunks(model)
    return model.eval()


def prompt(length: int, device: str) -> Tensor:
    """Tokens [1, length]."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, VOCABULARY, (1, length), generator=generator).to(device)


def trained(model: Any, tokens: Tensor, count: int) -> Tensor:
    """The log-probabilities after the last tokens but one, [count, vocabulary], of a forward with gradients."""
    logits = model(input_ids=tokens, use_cache=False).logits
    assert logits.requires_grad
    return logits.detach()[0, -count - 1 : -1].float().log_softmax(-1)


@torch.no_grad()
def by_dynamic_cache(model: Any, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Generates tokens with a cache of transformers: (all tokens, log-probabilities [count, vocabulary])."""
    from transformers import DynamicCache

    cache, given, logits = DynamicCache(config=model.config), tokens, []
    for _ in range(count):
        logits.append(model(input_ids=given, past_key_values=cache, use_cache=True).logits[0, -1])
        given = logits[-1].argmax()[None, None]
        tokens = torch.cat([tokens, given], 1)
    return tokens, torch.stack(logits).float().log_softmax(-1)


@contextmanager
def _registered(function: Any) -> Iterator[None]:
    from transformers import AttentionInterface, AttentionMaskInterface

    interfaces = AttentionInterface, AttentionMaskInterface
    for interface, value in zip(interfaces, (function, lambda *args, **kwargs: None), strict=True):
        interface.register(PAGED, value)
    try:
        yield
    finally:
        for interface in interfaces:
            interface._global_mapping.pop(PAGED)


@torch.no_grad()
def by_blocks(model: Any, prompts: Sequence[Tensor], count: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """Generates tokens of several sequences at a time over a paged cache; the results are those of `by_dynamic_cache`.

    Args:
        prompts: [1, length] each.
        count: of new tokens.
        size: of a block.
    """
    lengths = [tokens.shape[1] for tokens in prompts]
    like = torch.empty(0, DIM, dtype=torch.bfloat16, device=prompts[0].device)
    attention = PagedGeneration(LAYERS, [length + count for length in lengths], size, like, KV_HEADS)
    found, logits = [*prompts], []
    with _registered(attention):
        model.set_attn_implementation(PAGED)

        def step(tokens: Tensor, rows: slice) -> Tensor:
            attention.rows = rows
            places = attention.lengths[rows, None] + torch.arange(tokens.shape[1], device=tokens.device)
            out: Tensor = model(input_ids=tokens, position_ids=places, use_cache=False).logits[:, -1]
            attention.lengths[rows] += tokens.shape[1]
            return out

        logits.append(torch.cat([step(tokens, slice(b, b + 1)) for b, tokens in enumerate(prompts)]))
        for _ in range(count - 1):
            new = logits[-1].argmax(-1)[:, None]
            found = [torch.cat([tokens, new[b : b + 1]], 1) for b, tokens in enumerate(found)]
            logits.append(step(new, slice(0, len(prompts))))
        new = logits[-1].argmax(-1)[:, None]
        found = [torch.cat([tokens, new[b : b + 1]], 1) for b, tokens in enumerate(found)]
        model.set_attn_implementation(NAME)
    rows = torch.stack(logits, 1).float().log_softmax(-1)
    return list(zip(found, rows, strict=True))
