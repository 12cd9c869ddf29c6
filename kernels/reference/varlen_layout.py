"""Varlen layouts in plain ATen: tokens are copied to padded rows, and results back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...model.attention_spec import AttentionSpec
from ...model.mask import ROW_BLOCK, Mask


@dataclass(frozen=True)
class VarlenLayout:
    """The tokens that the padded rows of a packed call hold, see `model.VarlenLayout`.

    Attributes:
        tokens: int64 [rows], the token of each row; undefined where a row has none.
        exists: bool [rows], whether the row has a token.
    """

    tokens: Tensor
    exists: Tensor

    @staticmethod
    def of(spec: AttentionSpec, extras: Sequence[Tensor]) -> VarlenLayout | None:
        """Returns the tokens of the padded rows of a call; None if it has no varlen layout, so that tokens are rows.

        Args:
            extras: the tensors that the call reads.
        """
        layout = spec.mask.varlen_layout
        if layout is None:
            return None
        offset, count = (extras[operand.index][:, None] for operand in (layout.token_offset, layout.token_count))
        local = torch.arange(ROW_BLOCK, device=offset.device)
        return VarlenLayout((offset.long() + local).flatten(), (local < count).flatten())

    @staticmethod
    def of_rows(spec: AttentionSpec) -> AttentionSpec:
        """Returns the spec without its varlen layout, for operands that `filled` has copied to padded rows."""
        segments = replace(spec.mask.segments, varlen_layout=None)
        return replace(spec, mask=Mask(spec.mask.band, segments))

    def filled(self, tensor: Tensor) -> Tensor:
        """Copies [1, heads, tokens, dim] to [1, heads, rows, dim], with zeros in rows without a token."""
        found = tensor.new_zeros(*tensor.shape[:2], len(self.tokens), tensor.shape[3])
        found[:, :, self.exists] = tensor[:, :, self.tokens[self.exists]]
        return found

    def emptied(self, tensor: Tensor, tokens: int) -> Tensor:
        """Copies [1, heads, rows, dim] back to [1, heads, tokens, dim]; `tokens` is the number of tokens."""
        found = tensor.new_empty(*tensor.shape[:2], tokens, tensor.shape[3])
        found[:, :, self.tokens[self.exists]] = tensor[:, :, self.exists]
        return found
