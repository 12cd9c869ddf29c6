"""The core attention of Megatron-Core's layers, computed by dash_inductor: `DotProductAttention`.

Megatron's own class of this name breaks the graph of `torch.compile` (a buffer of the process, a fused softmax, a
generator of random numbers), and what is left of its attention is in no graph.  This class computes the same with one
call, in compiled layers and in others.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.transformer import dot_product_attention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from ..eager.attention import attention
from ..errors import ArgumentError


class DotProductAttention(dot_product_attention.DotProductAttention):  # type: ignore[misc]  # Megatron has no types
    """The core attention of a Megatron layer, deterministic, without Transformer Engine.

    It takes the place of Megatron's class in a layer's specification, and reads the same settings: tensor-parallel
    heads, grouped heads, `window_size`, `softmax_type` (attention sinks), `apply_query_key_layer_scaling` and dropout,
    which draws from Megatron's generator as Megatron's does.

        spec = get_gpt_layer_local_spec()
        spec.submodules.self_attention.submodules.core_attention = DotProductAttention

    Masks have Megatron's meaning: with a window the window alone, else `attention_mask` if there is one, else the
    triangle if the layer is causal.  A causal layer without `attention_mask` runs the fastest kernels.  A query that
    sees no key gets zeros, where Megatron's class averages all values.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Computes attention.

        Args:
            query: [queries, batch, heads of this rank, head dimension].
            key, value: [keys, batch, key heads of this rank, head dimension].
            attention_mask: bool, True for hidden pairs; broadcasts to [batch, heads, queries, keys].
            attn_mask_type: not read, as in Megatron's class; the layer's own type counts.
            attention_bias, packed_seq_params: not supported, as in Megatron's class.

        Returns:
            [queries, batch, heads of this rank * head dimension].

        Raises:
            ArgumentError: `attention_bias` or `packed_seq_params` is given, or a causal layer without a mask has other
                numbers of queries and keys.
        """
        for name, given in (("attention_bias", attention_bias), ("packed_seq_params", packed_seq_params)):
            if given is not None:
                raise ArgumentError(name, type(given).__name__, "None without Transformer Engine")
        softmax = self.scale_mask_softmax
        causal = False
        if softmax.window_size is not None:
            attention_mask = None
        elif attention_mask is None and self.attn_mask_type == AttnMaskType.causal and query.shape[0] > 1:
            causal = True
            if query.shape[0] != key.shape[0]:
                lengths = query.shape[0], key.shape[0]
                raise ArgumentError("query, key", lengths, "equal lengths in a causal layer without attention_mask")
        dropout = self.attention_dropout.p if self.training else 0.0
        forked = dropout > 0 and not self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if forked else nullcontext():
            out = attention(
                query.permute(1, 2, 0, 3),
                key.permute(1, 2, 0, 3),
                value.permute(1, 2, 0, 3),
                None if attention_mask is None else attention_mask.logical_not(),
                causal=causal,
                window=softmax.window_size,
                scale=self.softmax_scale * (softmax.scale or 1),
                dropout=dropout,
                sinks=self.softmax_offset,
            )
        return out.permute(2, 0, 1, 3).flatten(2)
