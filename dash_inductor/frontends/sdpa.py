"""Frontend for the fused operators of `scaled_dot_product_attention`: [batch, heads, length, head dim]."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch.fx import Graph, Node

from ..graph import sizes
from ..graph.nodes import Argument, op_name, origin
from ..model.mask import Band
from ..model.plan import Fallback
from ..model.reasons import Reason
from .attention import Attention, Backward, Forward, Found, Inputs, NotReadable, Output, View
from .fusable import CALLS
from .operators import Pair, Refused, calls

_SDPA = "aten::_scaled_dot_product_"
FLASH = Pair(_SDPA + "flash_attention", _SDPA + "flash_attention_backward", without_keys=math.inf)
EFFICIENT = Pair(
    _SDPA + "efficient_attention", _SDPA + "efficient_attention_backward", grad_out="grad_out_", mask="attn_bias",
    without_keys=0.0, multiple=32,
)  # fmt: skip
CUDNN = Pair(_SDPA + "cudnn_attention", _SDPA + "cudnn_attention_backward", mask="attn_bias")
FLASH_CPU = Pair(
    _SDPA + "flash_attention_for_cpu", _SDPA + "flash_attention_for_cpu_backward", mask="attn_mask", random_state=(),
    without_keys=0.0,
)  # fmt: skip
PAIRS = (FLASH, EFFICIENT, CUDNN, FLASH_CPU)

_OF_CUDNN = (-65504.0, -65536.0)
"""The numbers that PyTorch adds to scores hidden by a boolean mask for cuDNN: as written, and in bfloat16."""

_OVERRIDEABLE = Refused(
    _SDPA + "fused_attention_overrideable", _SDPA + "fused_attention_overrideable_backward", Reason.UNSUPPORTED_OP
)


_PART = "its results are merged with those of other keys, and read by a backward"
_MERGED = "bits depend on how keys are split: output and log-sum-exp are merged from"


def find(graph: Graph) -> Iterator[Found]:
    """Yield the attentions in a graph that call SDPA's fused operators; implements `Frontend`."""
    found = list(calls(graph, (*PAIRS, _OVERRIDEABLE)))
    merged = {node: pair.merged_from(node) for pair, node in found if isinstance(pair, Pair) and pair.is_backward(node)}
    parts = {part for forwards in merged.values() for part in forwards}
    for pair, node in found:
        if isinstance(pair, Refused):
            yield pair.refusal(node)
        elif pair.is_backward(node):
            yield _attention(pair, node, merged[node])
        else:
            yield _alone(pair, node, node in parts)


def _alone(pair: Pair, node: Node, is_part: bool) -> Attention:
    """Return the attention of a forward without a backward of its own.

    Args:
        pair: its operators.
        node: the forward.
        is_part: whether its results are merged with those of other forwards before a backward reads them.
    """
    forward = replace(_forward(pair, node), not_read=pair.without_dropout(node))
    if not is_part:
        return Attention(forward, None, pair.forward)
    return Attention(forward, None, pair.forward, partial(_of_part, forward), _PART)


def _of_part(forward: Forward) -> Fallback | None:
    if forward.inputs.dropout == 0.0:
        return None
    return Fallback(Reason.DROPOUT, f"{_PART}, which has to know what was dropped")


def _attention(pair: Pair, node: Node, merged: tuple[Node, ...]) -> Attention:
    """Return the attention of a backward; `merged` as in `Backward.merged`."""
    found = pair.forward_of(node)
    backward = Backward(
        node,
        _inputs(pair, node),
        grad_out=View(pair.argument(node, pair.grad_out)),
        out=pair.view(node, "out"),
        logsumexp=pair.argument(node, "logsumexp"),
        gradients=pair.gradients(node),
        bias_gradient=_bias_gradient(pair, node),
        random_state=tuple(pair.argument(node, name) for name in pair.random_state),
        merged=merged,
    )
    note = f"{_MERGED} {', '.join(part.name for part in merged)}" if merged else ""
    return Attention(None if found is None else _forward(pair, found), backward, pair.forward, note=note)


def _forward(pair: Pair, node: Node) -> Forward:
    return Forward(node, _inputs(pair, node), Output(node, 0), pair.logsumexp(node))


def _inputs(pair: Pair, node: Node) -> Inputs:
    args = pair.arguments(node)
    flags = Band(0, None) if args["is_causal"] else Band()
    mask = floats = None if pair.mask is None or args[pair.mask] is None else pair.argument(node, pair.mask)
    if pair is CUDNN and mask is not None:
        mask = _before_conversion(mask) or mask
    return pair.inputs(
        node,
        flags=flags,
        band=partial(_top_left, pair, flags, pair.view(node, "query"), pair.view(node, "key")),
        mask=mask,
        data=() if mask is None else (mask.value,),
        mask_as_floats=None if mask is floats else floats,
    )


def _before_conversion(mask: Argument) -> Argument | None:
    """Return the program's boolean mask, which PyTorch converts to floats for cuDNN; None for other masks.

    Up to torch 2.12 the converted mask has -65504 where the boolean mask hides a key.  If a program writes this number
    itself, it is added to the scores, so the conversion must be one of `scaled_dot_product_attention`'s own nodes.
    """
    node = origin(mask.value)
    stack = node.meta.get("source_fn_stack")
    if op_name(node) != "aten::where" or not stack or stack[-1][1] not in CALLS:
        return None
    condition, visible, hidden = (node.args[place] for place in range(3))
    is_mask = isinstance(condition, Node) and condition.meta["val"].dtype == torch.bool
    return Argument(node, "condition") if is_mask and _filled(visible) == 0 and _filled(hidden) in _OF_CUDNN else None


def _filled(value: object) -> object:
    """Return the number in a constant node without dimensions, even if Inductor has folded it; None for other nodes."""
    if not isinstance(value, Node) or value.meta["val"].dim():
        return None
    place = {"aten::scalar_tensor": 0, "aten::full": 1}.get(op_name(value))
    return None if place is None else value.args[place]


def _top_left(pair: Pair, band: Band, query: View, key: View) -> Band:
    """Return the band if its alignment is top left.

    If the lengths differ, flash aligns bottom right and the other operators top left; PyTorch then does not use flash.

    Raises:
        NotReadable: a causal flash call with different lengths.
    """
    q_len, kv_len = query.node.meta["val"].shape[2], key.node.meta["val"].shape[2]
    if pair is FLASH and not band.is_full and not sizes.same(q_len, kv_len):
        raise NotReadable(Reason.CAUSAL_LENGTHS, f"query length {q_len}, key length {kv_len}")
    return band


def _bias_gradient(pair: Pair, node: Node) -> Output | None:
    wanted = pair.arguments(node).get("grad_input_mask", (False,) * 4)[3]
    return Output(node, 3) if wanted else None
