"""A small GPT of Megatron-Core with its core attention or ours, on one rank without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily


class _Generators:
    """Stands for Megatron-Core's generators of a rank, which need a GPU."""

    def fork(self) -> nullcontext[None]:
        return nullcontext()


@contextmanager
def gpt(length: int, *, own: bool = False) -> Iterator[Any]:
    """A model of two layers for a vocabulary of 128 tokens, with a process group of one rank.

    Args:
        length: the maximum length of a sequence.
        own: whether its core attention is Megatron-Core's class.
    """
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from dash_inductor.integrations.megatron import DotProductAttention

    with unset_fake_temporarily(), torch.device("cpu"):
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(1)
    spec = get_gpt_layer_local_spec()
    if not own:
        spec.submodules.self_attention.submodules.core_attention = DotProductAttention
    settings = TransformerConfig(
        num_layers=2, hidden_size=128, num_attention_heads=2, num_query_groups=1, use_cpu_initialization=True,
        attention_dropout=0.0, hidden_dropout=0.0, persist_layer_norm=False, bias_activation_fusion=False,
        bias_dropout_fusion=False, params_dtype=torch.bfloat16, bf16=True, masked_softmax_fusion=False,
    )  # fmt: skip
    try:
        with mock.patch.object(tensor_parallel, "get_cuda_rng_tracker", _Generators):
            yield GPTModel(settings, spec, 128, length)
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
