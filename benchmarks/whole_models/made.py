"""Helpers shared by the makers of models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, dict[str, Any]]
"""A model and its inputs."""


def numbers(below: int, *shape: int) -> Tensor:
    """Draws random non-negative integers, used as tokens, labels and indices."""
    return torch.randint(0, below, shape)


def pictures(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


def causal(config: Any, batch: int, length: int) -> Made:
    """Makes a transformers language model, with inputs in which the tokens are also the labels."""
    from transformers import AutoModelForCausalLM

    tokens = numbers(config.vocab_size, batch, length)
    return AutoModelForCausalLM.from_config(config), {"input_ids": tokens, "labels": tokens}


def padded(inputs: dict[str, Any]) -> dict[str, Any]:
    """Texts of several lengths: padding behind all but the first, up to three eighths of the longest, and a mask that
    names it; labels are ignored there.

    Raises:
        ValueError: inputs without tokens.
    """
    if "input_ids" not in inputs:
        raise ValueError(f"inputs of a model have no input_ids, but {', '.join(inputs)}")
    rows, length = inputs["input_ids"].shape
    lengths = torch.linspace(length, length * 5 / 8, rows).long()
    mask = torch.arange(length) < lengths[:, None]
    labels = inputs["labels"].masked_fill(~mask, -100)
    return {**inputs, "attention_mask": mask.long(), "labels": labels}


def hooked(model: Any, pixels: Tensor, **others: Any) -> Any:
    """A model of transformers after a call outside of graphs, in which it installs hooks that Dynamo cannot trace."""
    with torch.no_grad():
        model(pixel_values=pixels.to(model.dtype), **others)
    return model
