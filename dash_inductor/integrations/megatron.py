"""The core attention of Megatron-Core's layers, computed by dash_inductor: `DotProductAttention`.

Megatron's own class of this name breaks the graph of `torch.compile` (a buffer of the process, a fused softmax, a
generator of random numbers), and what is left of its attention is in no graph.  This class computes the same with one
call, in compiled layers and in others.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer import dot_product_attention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from ..eager.attention import attention
from ..eager.packed_attention import packed_attention
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

    Packed sequences ("thd"), which Megatron's class does not know, are computed without dropout and sinks.  The mask of
    each sequence is causal if the call or the layer says so; `attention_mask` is not read.
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
            query: [queries, batch, heads of this rank, head dimension]; [tokens, heads, head dimension] if packed.
            key, value: [keys, batch, key heads of this rank, head dimension], or as query if packed.
            attention_mask: bool, True for hidden pairs; broadcasts to [batch, heads, queries, keys].
            attn_mask_type: whether packed sequences are causal; else not read, as in Megatron's class, because the
                layer's own type counts.
            attention_bias: not supported, as in Megatron's class.
            packed_seq_params: a `PackedSeqParams` of packed sequences.  Attention is replaced if its `cu_seqlens_q` and
                `cu_seqlens_kv` are one tensor.

        Returns:
            [queries, batch, heads of this rank * head dimension], or without batch if packed.

        Raises:
            ArgumentError: `attention_bias` is given, `attention_mask` is not bool, a causal layer without a mask has
                other numbers of queries and keys, or packed sequences are in another format, padded, or with dropout or
                sinks.
        """
        if attention_bias is not None:
            raise ArgumentError("attention_bias", "a tensor", "None without Transformer Engine")
        if attention_mask is not None and attention_mask.dtype != torch.bool:
            raise ArgumentError("attention_mask", attention_mask.dtype, "torch.bool, True for hidden pairs")
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params, attn_mask_type or self.attn_mask_type)
        softmax = self.scale_mask_softmax
        causal = False
        if softmax.window_size is not None:
            attention_mask = None
        elif attention_mask is None and self.attn_mask_type == AttnMaskType.causal and query.shape[0] > 1:
            causal = True
            if query.shape[0] != key.shape[0]:
                lengths = query.shape[0], key.shape[0]
                raise ArgumentError("query, key", lengths, "equal lengths in a causal layer without attention_mask")
        dropout = self._dropout
        forked = dropout > 0 and not self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if forked else nullcontext():
            out = attention(
                query.permute(1, 2, 0, 3),
                key.permute(1, 2, 0, 3),
                value.permute(1, 2, 0, 3),
                None if attention_mask is None else attention_mask.logical_not(),
                causal=causal,
                window=softmax.window_size,
                scale=self._scale,
                dropout=dropout,
                sinks=self.softmax_offset,
            )
        return out.permute(2, 0, 1, 3).flatten(2)

    @property
    def _dropout(self) -> float:
        return float(self.attention_dropout.p) if self.training else 0.0

    @property
    def _scale(self) -> float:
        """The factor of the scores, of which Megatron divides a part by the layer's number and multiplies it again."""
        return float(self.softmax_scale * (self.scale_mask_softmax.scale or 1))

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, packed: Any, mask_type: AttnMaskType) -> Tensor:
        """The attention of packed sequences: [tokens, heads of this rank * head dimension]."""
        padded = packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded
        for name, given, allowed in (
            ("packed_seq_params.qkv_format", packed.qkv_format, "thd"),
            (
                "packed_seq_params.cu_seqlens_q_padded, cu_seqlens_kv_padded",
                [t is not None for t in padded],
                [False] * 2,
            ),
            ("attention_dropout", self._dropout, 0.0),
            ("softmax_type", self.config.softmax_type, "vanilla"),
        ):
            if given != allowed:
                raise ArgumentError(name, given, f"{allowed} with packed sequences")
        window = self.scale_mask_softmax.window_size
        if window is None:
            window = (-1, 0 if "causal" in mask_type.name else -1)
        out = packed_attention(
            query, key, value, packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.max_seqlen_q, packed.max_seqlen_kv,
            scale=self._scale, window=tuple(window),
        )  # fmt: skip
        return out.flatten(1)
