"""Frontend for the packages flash-attn 2 and 3, whose backwards write gradients into tensors of the caller.

Copies of the packages, and kernels from a hub, use other namespaces, so operators are recognised by their names and
argument names.  The packages' operators call those of their C++ extensions (`fwd`, `bwd`, `varlen_bwd`), which are
recognised in namespaces of the packages if their schemas declare that they write only to gradients.  Tensors are
[batch, length, heads, head dim] or, with `cu_seqlens_q`, [tokens, heads, head dim].  Causal attention and windows are
anchored bottom right.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..graph import sizes
from ..graph.nodes import Argument, called, is_functionalized, op_name, origin
from ..model.mask import Band
from ..model.plan import Fallback
from ..model.reasons import Reason
from . import varlen
from .attention import Attention, Backward, Forward, Found, Inputs, Output, Sink
from .operators import Pair, calls
from .written import is_written, written

_NAMES = {
    "query": "q", "key": "k", "value": "v", "logsumexp": "softmax_lse", "scale": "softmax_scale", "is_causal": "causal",
    "cu_seq_q": "cu_seqlens_q", "cu_seq_k": "cu_seqlens_k",
}  # fmt: skip
"""The packages' argument names, by the names that all `Pair`s share."""

_EXTENSIONS = {
    "p_dropout": "dropout_p", "alibi_slopes_": "alibi_slopes", "dq_": "dq", "dk_": "dk", "dv_": "dv",
}  # fmt: skip
"""The packages' argument names, by those of the C++ extensions."""

_READ = {"q", "k", "v", "softmax_scale", "window_size_left", "window_size_right"}
_SAVED = {"dout", "out", "softmax_lse"}
_WRITTEN = {"dq", "dk", "dv"}
"""`_READ`: the arguments of every call.  `_SAVED`, `_WRITTEN`: those that a backward also reads and writes."""

_UNDERSTOOD = {
    *_NAMES, *_NAMES.values(), *_SAVED, *_WRITTEN, "dropout_p", "window_size_left", "window_size_right", "softcap",
    "alibi_slopes", "rng_state", "max_seqlen_q", "max_seqlen_k",
}  # fmt: skip
_OF_NO_MATTER = {
    "deterministic", "return_softmax", "zero_tensors", "num_splits", "pack_gqa", "rotary_interleaved",
}  # fmt: skip
"""`_UNDERSTOOD`: the arguments that are read.  `_OF_NO_MATTER`: arguments that do not change what is computed."""

_SAME = ("scale", "is_causal", "window_size_left", "window_size_right", "softcap", "alibi_slopes")
"""Arguments that must be the same in a backward and its forward."""


def find(graph: Graph) -> Iterator[Found]:
    """Yield the attentions in a graph that call operators of flash-attn 2 or 3; implements `Frontend`."""
    for pair, node in calls(graph, list(_pairs(graph))):
        assert isinstance(pair, Pair)
        yield _attention(pair, node)


def _pairs(graph: Graph) -> Iterator[Pair]:
    """Yield the operator pairs of which the graph has calls."""
    found: dict[str, Pair] = {}
    for node in graph.nodes:
        namespace, _, name = op_name(node).partition("::")
        match = _OF_PACKAGES.fullmatch(name) or (_PACKAGE.search(namespace) and _OF_EXTENSIONS.fullmatch(name))
        if not match or (operator := called(node)) is None:
            continue
        arguments = operator._schema.arguments
        own = {_EXTENSIONS.get(argument.name, argument.name): argument.name for argument in arguments}
        needed = _READ | _SAVED | _WRITTEN if match["backward"] else _READ
        read = {own.get(name) for name in needed - _WRITTEN}
        if not own.keys() >= needed or any(is_written(argument) for argument in arguments if argument.name in read):
            continue
        prefix = match["prefix"]
        drops = "dropout_p" in own
        found[f"{namespace}::{prefix}"] = Pair(
            f"{namespace}::{prefix}{_FORWARD[match['direction']]}",
            f"{namespace}::{prefix}{_BACKWARD[match['direction']]}",
            grad_out="dout",
            random_state=("rng_state",) if drops else (),
            renamed=own | {shared: own.get(name, name) for shared, name in _NAMES.items()},
            # `normalize_softmax_lse` of version 2, `Softmax.finalize` of version 3.
            without_keys=math.inf if drops else -math.inf,
        )
    yield from found.values()


_OF_PACKAGES = re.compile("(?P<prefix>_flash_attn_(varlen_)?)(?P<direction>forward|(?P<backward>backward))")
_OF_EXTENSIONS = re.compile("(?P<prefix>(mha_)?(varlen_)?)(?P<direction>fwd|(?P<backward>bwd))")
_PACKAGE = re.compile("flash_?attn", re.IGNORECASE)
_FORWARD = {"forward": "forward", "backward": "forward", "fwd": "fwd", "bwd": "fwd"}
_BACKWARD = {"forward": "backward", "backward": "backward", "fwd": "bwd", "bwd": "bwd"}


def _attention(pair: Pair, node: Node) -> Attention:
    args = _arguments(pair, node)
    packed = args["cu_seq_q"] is not None or args["cu_seq_k"] is not None
    pair = dataclasses.replace(pair, axes="thd" if packed else "bshd")
    if not pair.is_backward(node):
        alone = _forward(pair, node, args)
        return Attention(alone, None, pair.forward, partial(_refusal, args, None, alone, None))
    found = pair.forward_of(node)
    of_forward = None if found is None else _arguments(pair, found)
    gradients = written(node, [pair.renamed[name] for name in ("dq", "dk", "dv")], pair.axes)
    drops = args["dropout_p"] != 0.0
    backward = Backward(
        node,
        _inputs(pair, node, args),
        grad_out=pair.view(node, pair.grad_out),
        out=pair.view(node, "out"),
        logsumexp=None if packed else pair.argument(node, "logsumexp"),
        gradients=gradients or (Output(node, 1, pair.axes), Output(node, 2, pair.axes), Output(node, 3, pair.axes)),
        random_state=tuple(pair.argument(node, name) for name in pair.random_state) if drops else (),
    )
    forward = None if found is None or of_forward is None else _forward(pair, found, of_forward)
    return Attention(forward, backward, pair.forward, partial(_refusal, args, of_forward, forward, gradients, node))


def _arguments(pair: Pair, node: Node) -> dict[str, Any]:
    """Return a call's arguments by the names that all pairs share; those that a version lacks get a neutral default."""
    found = {"cu_seq_q": None, "cu_seq_k": None, "alibi_slopes": None, "softcap": 0.0} | pair.arguments(node)
    return {"is_causal": False} | found


def _forward(pair: Pair, node: Node, args: Mapping[str, Any]) -> Forward:
    logsumexp: Output = pair.logsumexp(node)
    if args["alibi_slopes"] is not None:  # causal calls of version 2 add another number to all scores of a row
        logsumexp = Output(node, 1)
    return Forward(node, _inputs(pair, node, args), Output(node, 0, pair.axes), logsumexp)


def _inputs(pair: Pair, node: Node, args: Mapping[str, Any]) -> Inputs:
    return pair.inputs(
        node,
        flags=None,
        band=partial(varlen.band if pair.axes == "thd" else _bottom_right, args),
        modifiers={"softcap": args["softcap"]},
        slopes=None if args["alibi_slopes"] is None else Argument(node, "alibi_slopes"),
    )


def _bottom_right(args: Mapping[str, Any]) -> Band:
    """Return the band of a call that is not packed; for equal lengths, top left anchoring is equivalent and is used."""
    band = varlen.band(args)
    q_len, kv_len = (args[name].meta["val"].shape[1] for name in ("query", "key"))
    return band if band.is_full or sizes.same(q_len, kv_len) else Band(band.lo, band.hi, "bottom_right")


def _refusal(
    args: Mapping[str, Any],
    of_forward: Mapping[str, Any] | None,
    forward: Forward | None,
    gradients: tuple[Sink, Sink, Sink] | None,
    backward: Node | None = None,
) -> Fallback | None:
    """Return why a call is not replaced, given its arguments, its results and, if it is in the graph, its forward's
    arguments.

    Return None if nothing prevents its replacement.
    """
    for each in (args, *([] if of_forward is None else [of_forward])):
        others = [name for name, value in each.items() if name not in _UNDERSTOOD | _OF_NO_MATTER and _asks(value)]
        if others:
            given = ", ".join(f"{name}={each[name]}" for name in others)
            return Fallback(Reason.UNSUPPORTED_OP, f"it has {given}; without that it is replaced")
    if forward is not None and is_functionalized(forward.node):
        return Fallback(Reason.UNSUPPORTED_OP, "its forward writes to an argument")
    if backward is not None:
        if gradients is None:
            return Fallback(Reason.UNSUPPORTED_OP, "it does not write all of dq, dk and dv into tensors that are known")
        if any(user.users for user in backward.users if user.args[1] == 0):
            return Fallback(Reason.UNSUPPORTED_OP, "a result beside the gradients is used")
    different = [name for name in _SAME if of_forward is not None and not _equal(args[name], of_forward[name])]
    if different:
        return Fallback(Reason.FORWARD_FALLBACK, f"forward and backward have different {' and '.join(different)}")
    if args["cu_seq_q"] is not None or args["cu_seq_k"] is not None:
        if args["alibi_slopes"] is not None:
            return Fallback(Reason.VARLEN, f"it has alibi_slopes={args['alibi_slopes']}; without that it is replaced")
        cause = varlen.cause_of_fallback(args, of_forward or {}).replace("cu_seq_", "cu_seqlens_")
        return Fallback(Reason.VARLEN, cause) if cause else None
    bounds = args["window_size_left"], args["window_size_right"]
    if None in map(varlen.number, bounds):
        return Fallback(Reason.DYNAMIC_DIMS, f"its window is {bounds}, which no guard can fix")
    if args["dropout_p"] != 0.0 and backward is not None and args.get("rng_state") is None:
        return Fallback(Reason.DROPOUT, "it has no rng_state, so that the random numbers of its forward are not known")
    return _of_slopes(args)


def _of_slopes(args: Mapping[str, Any]) -> Fallback | None:
    slopes = args["alibi_slopes"]
    if slopes is None:
        return None
    value, query = slopes.meta["val"], args["query"].meta["val"]
    if query.dim() != 4:
        return None  # not replaced for another reason
    batch, heads = query.shape[0], query.shape[2]
    # Slopes that were saved for a backward no longer share the symbols of the query, so that this may need a guard.
    fits = value.dim() in (1, 2) and all(map(sizes.made_same, value.shape, (batch, heads)[-value.dim() :]))
    if value.dtype != torch.float32 or value.device != query.device or not fits:
        given = f"alibi_slopes are {value.dtype} {tuple(value.shape)} on {value.device}"
        return Fallback(Reason.SHAPE, f"{given}; float32 [heads] or [batch, heads] on {query.device} are read")
    return None


def _asks(value: object) -> bool:
    """Return whether an argument has an effect: it is not None, False or zero."""
    return value is not None and (isinstance(value, (Node, Tensor)) or bool(value))


def _equal(a: object, b: object) -> bool:
    if isinstance(a, Node) and isinstance(b, Node):
        return origin(a) is origin(b)
    return type(a) is type(b) and bool(a == b)
