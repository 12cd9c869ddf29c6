"""FLOP formulas of our operators, which count as PyTorch's formulas for the operators that they replace.

They are used by `torch.utils.flop_counter`, and by PyTorch's partitioner to decide what is recomputed.  All (query,
key) pairs count, whatever the mask, except pairs of different packed documents.  Document lengths are data: in a graph,
where they are not known, PyTorch assumes the maximum length for each; here all tokens count as one document, which is
an upper bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from ..model.attention_spec import AttentionSpec
from ..model.components import Segments
from ..upstream.dispatch import OpOverload
from ..upstream.fake import is_fake


def register(forward: OpOverload, backward: OpOverload) -> None:
    """Registers PyTorch FLOP formulas for our operators of attention's forward and backward."""
    register_flop_formula(forward.overloadpacket, get_raw=True)(_forward)
    register_flop_formula(backward.overloadpacket, get_raw=True)(_backward)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, extras: Sequence[Tensor], spec: str, *_: Any, out_val: Any = None
) -> int:
    return _count(sdpa_flop_count, (query, key, value), extras, spec)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    extras: Sequence[Tensor],
    spec: str,
    *_: Any,
    out_val: Any = None,
) -> int:
    return _count(sdpa_backward_flop_count, (grad_out, query, key, value), extras, spec)


def _count(formula: Callable[..., int], tensors: Sequence[Tensor], extras: Sequence[Tensor], spec: str) -> int:
    """Evaluates a formula of PyTorch, summed over the documents of a packed mask.

    Args:
        formula: PyTorch's formula, a function of shapes.
        tensors: the tensors whose shapes it takes: the gradient of the output (backward only), query, key and value;
            key and value may have fewer heads.
    """
    query, segments = tensors[-3], AttentionSpec.parse(spec).mask.segments
    heads = query.shape[1]
    if segments is None or segments.varlen_layout is None:
        # the formulas of torch 2.11 do not support grouped heads
        return formula(*((tensor.shape[0], heads, *tensor.shape[2:]) for tensor in tensors))
    lengths = _lengths(segments, extras) or [query.numel() // (heads * query.shape[-1])]
    return sum(formula(*((1, heads, length, tensor.shape[-1]) for tensor in tensors)) for length in lengths)


def _lengths(segments: Segments, extras: Sequence[Tensor]) -> list[int]:
    """The number of tokens of each document; empty without data."""
    assert segments.varlen_layout is not None
    ids, keys, counts = (extras[of.index] for of in (segments.q, segments.kv, segments.varlen_layout.token_count))
    if is_fake(counts) or counts.is_meta:
        return []
    found: list[int] = ids[ids == keys].unique(return_counts=True)[1].tolist()
    return found
