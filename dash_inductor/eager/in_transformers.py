"""The attention implementation for transformers: ``attn_implementation="dash_inductor"``."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from .attention import attention
from .lazy_mask import LazyMask
from .mask_functions import Made, Operand, program, taken_apart


def register(name: str) -> None:
    """Registers dash_inductor's attention and its masks with transformers, under `name`."""
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """The attention function in transformers' interface: like its "sdpa", but with a softcap and sinks, too.

    Args:
        module: the layer, whose `is_causal` applies if there is no mask.
        query, key, value: [batch, heads, length, head dimension]; key and value may have fewer heads.
        attention_mask: a result of `mask`, or the program's own tensor, bool or floats that are added.
        dropout: the dropout probability of the attention weights.
        scaling: the factor of the scores.
        is_causal: replaces the module's `is_causal` if it is given.
        softcap: the bound of the scaled scores.
        s_aux: the sinks, [heads].
        position_bias: added to the scaled scores; broadcasts to [batch, heads, queries, keys].
        ignored: arguments that the mask already expresses, such as a window.

    Returns:
        The output [batch, queries, heads, head dimension of the value], and None for the weights.
    """
    queries, keys = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = queries > 1 and attention_mask is None and bool(causal)
    if causal and keys > queries:  # a KV cache with unused positions
        key, value = key[:, :, :queries], value[:, :, :queries]
        position_bias = position_bias if position_bias is None else position_bias[..., :queries]
    found = attention(
        query,
        key,
        value,
        attention_mask,
        causal=causal,
        scale=scaling,
        dropout=dropout,
        softcap=softcap,
        sinks=s_aux,
        bias=position_bias,
    )
    return found.transpose(1, 2).contiguous(), None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **more: Any,
) -> Tensor | None:
    """Makes the mask of a transformers model, bool [batch, 1, queries, keys], as a `LazyMask` without elements.

    The arguments are those of `transformers.masking_utils.sdpa_mask`.  The result is None if the attention needs no
    mask: all pairs are visible, or the mask is causal with as many queries as keys.  Nothing is read from the GPU.  A
    mask that is not a function of positions and a few tensors is an ordinary tensor.
    """
    is_known = allow_is_bidirectional_skip or (allow_is_causal_skip and q_length in (1, kv_length))
    if is_known and attention_mask is None and (local_size is None or kv_length < local_size):
        return None
    found = None
    if not (torch.compiler.is_compiling() or use_vmap or isinstance(q_offset, Tensor)):
        found = _lazy(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, device)
    if found is not None:
        return found
    dense: Tensor | None = masking_utils.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=cast(int, q_offset),
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=device,
        **more,
    )
    return dense


def _lazy(
    batch: int,
    queries: int,
    keys: int,
    query_offset: int,
    key_offset: int,
    function: Callable[..., Any],
    valid: Tensor | None,
    device: torch.device | str,
) -> LazyMask | None:
    """A `LazyMask`; None if its mask function cannot be decomposed, or positions do not start at the first key."""
    operands: list[Tensor] = []
    rule = taken_apart(function, operands)
    if rule is None or query_offset - key_offset not in (0, keys - queries):
        return None
    if key_offset and not _knows_distances_alone(rule):
        return None
    rule = _with_documents_counted(rule)
    if valid is not None:
        valid = F.pad(valid, (0, max(0, key_offset + keys - valid.shape[-1])))[:, key_offset : key_offset + keys]
        rule = Made(
            masking_utils.and_masks, (rule, Made(masking_utils.padding_mask_function, (Operand(len(operands)),)))
        )
        operands.append(valid)
    from_the_end = query_offset != key_offset
    return LazyMask(program(rule, from_the_end), tuple(operands), (batch, 1, queries, keys), torch.device(device))


_MOVES = ("sliding_window_overlay", "sliding_window_bidirectional_overlay")
"""transformers' factories of masks that depend only on the distance of two tokens."""


def _made_by(rule: Hashable, *names: str) -> Made | None:
    """The rule if its factory is one of these functions of transformers (not all exist in every version), else None."""
    made = isinstance(rule, Made) and any(rule.factory is getattr(masking_utils, name, None) for name in names)
    return cast(Made, rule) if made else None


def _knows_distances_alone(rule: Hashable) -> bool:
    """Whether a mask depends only on distances: it does not change if query and key positions shift together."""
    combined = _made_by(rule, "and_masks", "or_masks")
    if combined is not None:
        return all(map(_knows_distances_alone, combined.arguments))
    plain = (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)
    return _made_by(rule, *_MOVES) is not None or rule in plain


def _with_documents_counted(rule: Hashable) -> Hashable:
    """Rewrites a rule so that document ids of packed sequences are computed from the positions inside the graph.

    transformers computes the ids before it makes a mask; computed in the graph, they are recognised as document ids.
    Later versions pass ids and positions to two functions.
    """
    combined = _made_by(rule, "and_masks")
    if combined is None or _made_by(combined.arguments[-1], "packed_sequence_mask_function") is None:
        return rule
    positions = {position for other in combined.arguments for position in _positions(other)}
    if len(positions) != 1:
        return rule
    return Made(combined.factory, (*combined.arguments[:-1], Made(_same_document, tuple(positions))))


def _positions(rule: Hashable) -> set[Hashable]:
    """The position tensors to which a rule, and the rules in it, map indices."""
    if not isinstance(rule, Made):
        return set()
    here = {rule.arguments[1]} if _made_by(rule, "remap_positions_for_packed_sequence") else set()
    return here.union(*map(_positions, rule.arguments))


def _same_document(positions: Tensor) -> Callable[..., Any]:
    """A mask of documents, which begin where positions do not increase by 1, as in `find_packed_sequence_indices`."""
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    made: Callable[..., Any] = masking_utils.packed_sequence_mask_function((steps != 1).cumsum(-1))
    return made
