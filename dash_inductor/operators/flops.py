"""FLOPs of our operators, as PyTorch counts the FLOPs of the operators that they replace.

`torch.utils.flop_counter` shows them, and PyTorch's partitioner decides by them what is computed again.  Every query
counts with every key, whatever the mask: only packed documents are apart from one another.  The lengths of documents
are data.  Without data, as in a graph, PyTorch takes each of them to be as long as the longest may be; here all tokens
count as one document, which is never fewer than there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from ..model.call import Call
from ..model.mask import ROW_BLOCK
from ..model.terms import Segments
from ..upstream.dispatch import OpOverload
from ..upstream.fake import is_fake


def register(forward: OpOverload, backwards: Sequence[OpOverload]) -> None:
    """Register the formulas of our operators."""
    register_flop_formula(forward.overloadpacket, get_raw=True)(_forward)
    register_flop_formula([backward.overloadpacket for backward in backwards], get_raw=True)(_backward)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, extras: Sequence[Tensor], call: str, *_: Any, out_val: Any = None
) -> int:
    return _count(sdpa_flop_count, (query, key, value), extras, call)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    extras: Sequence[Tensor],
    call: str,
    *_: Any,
    out_val: Any = None,
) -> int:
    return _count(sdpa_backward_flop_count, (grad_out, query, key, value), extras, call)


def _count(formula: Callable[..., int], tensors: Sequence[Tensor], extras: Sequence[Tensor], call: str) -> int:
    """The formula of PyTorch, added up over documents where there are some.

    Args:
        tensors: the formula takes their shapes: first the gradient of the output, if it takes that, then query, key and
            value, of which the latter two may have fewer heads.
    """
    query, segments = tensors[-3], Call.parse(call).mask.segments
    heads = query.shape[1]
    if segments is None or segments.placed is None:
        # torch 2.11 knows no query heads that share one of key
        return formula(*((tensor.shape[0], heads, *tensor.shape[2:]) for tensor in tensors))
    lengths = _lengths(segments, extras) or [query.numel() // (heads * query.shape[-1])]
    return sum(formula(*((1, heads, length, tensor.shape[-1]) for tensor in tensors)) for length in lengths)


def _lengths(segments: Segments, extras: Sequence[Tensor]) -> list[int]:
    """How many tokens each document has, none without data; a token behind the last one is a document by itself."""
    assert segments.placed is not None
    ids, counts = extras[segments.q.index], extras[segments.placed.count.index]
    if is_fake(counts) or counts.is_meta:
        return []
    has_token = torch.arange(ROW_BLOCK, device=counts.device) < counts.unsqueeze(1)
    found: list[int] = ids.reshape(-1, ROW_BLOCK)[has_token].unique(return_counts=True)[1].tolist()
    return found
