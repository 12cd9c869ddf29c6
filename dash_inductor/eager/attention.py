"""Computes attention in eager programs by compiling it alone; passes replace and record it as in any graph."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _switch
from ..config import config
from .determinism import DETERMINISTIC
from .lazy_mask import LazyMask
from .mask_functions import MaskProgram


class Kind(NamedTuple):
    """The properties of an attention call on which its compiled code depends; calls with equal `Kind` share the code.

    Batch size and lengths may be dynamic and are not included.

    Attributes:
        program: computes the mask from positions; None if the mask is a tensor, or there is none.
        causal: whether query i sees only keys 0 to i, in addition to the mask.
        window: how many keys before and after its own position a query sees, in addition to the mask; None for all.
        scale: the factor of the scores; None for 1 / sqrt(head dimension).
        softcap: the bound of the scaled scores; None for none.
        dropout: the dropout probability of the attention weights.
        heads, dims: the numbers of heads, and the head dimensions, of query, key and value.
        dtypes: the dtypes of query, key and value.
        device: the device of the query.
        one_entry, one_query: whether the batch size is 1, and whether there is one query; both are specialised.
        trains: whether gradients are wanted.
        split_kv: the setting of this name, under which the code was compiled.
    """

    program: MaskProgram | None
    causal: bool
    window: tuple[int, int] | None
    scale: float | None
    softcap: float | None
    dropout: float
    heads: tuple[int, ...]
    dims: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    device: torch.device
    one_entry: bool
    one_query: bool
    trains: bool
    split_kv: bool


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Computes attention under deterministic algorithms, regardless of the program's own flag.

    While dash_inductor is off, it is computed by plain PyTorch operators under the program's flag.

    Args:
        query: [batch, heads, queries, head dimension]; float16, bfloat16 or float32 to be replaced.
        key, value: [batch, key heads, keys, head dimension], of query's dtype; each head serves heads / key heads query
            heads.
        mask: bool, True for visible pairs, or floats that are added to the scores; broadcasts to
            [batch, heads, queries, keys].
        causal: whether query i sees only keys 0 to i.
        window: (left, right) as in flash-attn: a query sees the keys from `left` positions before its own to `right`
            after it, counted from the ends of queries and keys; -1 for no limit.
        scale: the factor of the scores, by default 1 / sqrt(head dimension).
        dropout: the dropout probability of the attention weights.
        softcap: scaled scores s become ``softcap * tanh(s / softcap)``.
        sinks: [heads]; an extra score in every query's softmax, without a value.
        bias: floats that are added to the scaled scores, shaped like a float mask.

    Returns:
        [batch, heads, queries, head dimension of the value].
    """
    program: MaskProgram | None = None
    operands: tuple[Tensor, ...] = ()
    if isinstance(mask, LazyMask):
        if torch.compiler.is_compiling() or not _covers(mask, query, key):
            mask = mask.clone()
        else:
            program, operands, mask = mask.program, mask.operands, None
    of_query, of_key, of_value = query.shape, key.shape, value.shape
    kind = Kind(
        program,
        causal,
        window,
        scale,
        softcap,
        dropout,
        (of_query[1], of_key[1], of_value[1]),
        (of_query[3], of_key[3], of_value[3]),
        (query.dtype, key.dtype, value.dtype),
        query.device,
        of_query[0] == 1,
        of_query[2] == 1,
        torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad),
        config.split_kv,
    )
    if torch.compiler.is_compiling() or not _switch.is_enabled() or not is_replaced_on(query.device):
        return _written(kind, query, key, value, mask, sinks, bias, operands)
    with DETERMINISTIC:
        found: Tensor = _compiled(kind)(query, key, value, mask, sinks, bias, operands)
    return found


def _covers(mask: LazyMask, query: Tensor, key: Tensor) -> bool:
    return mask.sizes == (query.shape[0], 1, query.shape[2], key.shape[2])


def is_replaced_on(device: torch.device) -> bool:
    """Whether attention on a device is replaced."""
    return device.type != "cpu" or config.cpu != "off"


@functools.cache
def _compiled(kind: Kind) -> Callable[..., Any]:
    """The compiled function of a kind."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        sinks: Tensor | None,
        bias: Tensor | None,
        operands: Sequence[Tensor],
    ) -> Tensor:
        return _written(kind, query, key, value, mask, sinks, bias, operands)

    return compiled_alone(attention, kind)


def compiled_alone(function: Any, kind: Sequence[object]) -> Callable[..., Any]:
    """Compiles a function under a name of its own, by which Dynamo counts recompilations and knows dynamic sizes."""
    name = hashlib.sha256(" ".join(map(str, kind)).encode()).hexdigest()[:8]
    function.__code__ = function.__code__.replace(co_name=f"{function.__name__}_{name}")
    return torch.compile(function, fullgraph=True, options={"deterministic": True})


def _written(
    kind: Kind,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    operands: Sequence[Tensor],
) -> Tensor:
    """The attention in PyTorch operators, as it is compiled."""
    of_operands = [operand.shape for operand in operands if operand.dim()]
    _compare((query.shape[2], key.shape[2], value.shape[2], *(shape[-1] for shape in of_operands)))
    _compare((query.shape[0], key.shape[0], value.shape[0], *(shape[0] for shape in of_operands)))
    heads, key_heads, value_heads = kind.heads
    key, value = _repeated(key, heads // key_heads), _repeated(value, heads // value_heads)
    if kind.program is not None:
        mask = kind.program(operands, (query.shape[0], 1, query.shape[2], key.shape[2]), query.device)
    if kind.window is not None:
        mask = _both(_in_window(query, key, kind.window), mask)
    causal = kind.causal
    if causal and (bias is not None or kind.softcap is not None or sinks is not None):
        mask, causal = _causal(query, key, mask), False
    if bias is not None:
        mask = _added(bias, mask)
    if kind.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=kind.dropout, is_causal=causal, scale=kind.scale
        )
    return _by_hand(kind, query, key, value, mask, sinks)


def _compare(sizes: Sequence[int]) -> int:
    """Compares sizes, so that Dynamo adds guards for which of its dynamic sizes are equal.

    Without them, each tensor could have its own lengths; recognising masks and choosing kernels depend on their
    equality.
    """
    return sum(1 for size in sizes[1:] if size == sizes[0])


def _by_hand(
    kind: Kind, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """Attention with a softcap or sinks, decomposed as in models: `scaled_dot_product_attention` supports neither."""
    scale = 1 / math.sqrt(kind.dims[0]) if kind.scale is None else kind.scale
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    if kind.softcap is not None:
        scores = torch.tanh(scores / kind.softcap) * kind.softcap
    if sinks is None and mask is None:
        weights = F.softmax(scores, dim=-1, dtype=torch.float32)
    elif sinks is None and mask is not None:
        # As in `scaled_dot_product_attention`, the output of a query that sees no key is zero.
        scores = scores + _as_floats(mask, scores.dtype, -math.inf)
        weights = torch.ops.aten._safe_softmax(scores.to(torch.float32), -1)
    else:
        assert sinks is not None
        scores = scores if mask is None else scores + _as_floats(mask, scores.dtype)
        column = sinks.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[2], -1)
        weights = F.softmax(torch.cat([scores, column.to(scores.dtype)], dim=-1), dim=-1, dtype=torch.float32)[..., :-1]
    weights = F.dropout(weights.to(value.dtype), p=kind.dropout)
    return torch.matmul(weights, value)


def _repeated(tensor: Tensor, count: int) -> Tensor:
    """Repeats the heads of a key or value for all query heads: [batch, heads, length, head dimension]."""
    batch, heads, length, dim = tensor.shape
    if count == 1:
        return tensor
    return tensor[:, :, None].expand(batch, heads, count, length, dim).reshape(batch, heads * count, length, dim)


def _causal(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """The mask combined with a causal one."""
    return _both(
        torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None], mask
    )


def _in_window(query: Tensor, key: Tensor, window: tuple[int, int]) -> Tensor:
    """The window as a mask: bool [1, 1, queries, keys]."""
    left, right = window
    queries = torch.arange(query.shape[2], device=query.device)[:, None] + (key.shape[2] - query.shape[2])
    keys = torch.arange(key.shape[2], device=query.device)
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
    if left >= 0:
        seen = seen & (keys >= queries - left)
    if right >= 0:
        seen = seen & (keys <= queries + right)
    return seen[None, None]


def _both(seen: Tensor, mask: Tensor | None) -> Tensor:
    """A mask of booleans combined with another mask."""
    return seen if mask is None else seen & mask if mask.dtype == torch.bool else mask + _as_floats(seen, mask.dtype)


def _added(bias: Tensor, mask: Tensor | None) -> Tensor:
    """The bias combined with a mask, as one float mask."""
    if mask is None:
        return bias
    return torch.where(mask, bias, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask


def _as_floats(mask: Tensor, dtype: torch.dtype, hidden: float | None = None) -> Tensor:
    """The mask as floats to add to scores: `hidden`, by default the lowest finite number, for hidden pairs."""
    if mask.dtype != torch.bool:
        return mask
    lowest = torch.finfo(dtype).min if hidden is None else hidden
    return torch.where(mask, torch.zeros((), device=mask.device, dtype=dtype), lowest)
