"""Another way for attention to come into a graph: operators of a library, and the entry that finds them.

The library puts the log-sum-exp in front of the output and the gradients in the opposite order, and calls causal
attention a look to the left.  It is a double of such libraries: the entry is all that dash_inductor has to know of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import Graph, Node

from dash_inductor.frontends.attention import (
    Attention,
    Backward,
    Forward,
    Found,
    Inputs,
    Output,
    Refusal,
    View,
    is_alone,
    tensors_of,
)
from dash_inductor.graph.nodes import Argument, bind, op_name, origin
from dash_inductor.model.mask import Band
from dash_inductor.model.plan import Fallback
from dash_inductor.model.reasons import Reason

# ---- the library: tensors [batch, heads, length, head dim] ----


def _scores(query: Tensor, key: Tensor, looks_left: bool) -> Tensor:
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1) & looks_left
    return scores.masked_fill(hidden, -math.inf)


@torch.library.custom_op("another_library::attend", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, looks_left: bool, softcap: float = 0.0) -> tuple[Tensor, Tensor]:
    """The log-sum-exp, fp32 [batch, heads, length], and the output."""
    scores = _scores(query, key, looks_left)
    return torch.logsumexp(scores, -1).float(), torch.softmax(scores, -1) @ value


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, looks_left: bool, softcap: float = 0.0) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape[:3], dtype=torch.float32), torch.empty_like(query)


@torch.library.custom_op("another_library::attend_backward", mutates_args=())
def attend_backward(
    given: Tensor, output: Tensor, stats: Tensor, query: Tensor, key: Tensor, value: Tensor, looks_left: bool,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of value, key and query."""
    weights = torch.exp(_scores(query, key, looks_left) - stats[..., None])
    inner = weights * (given @ value.mT - (given * output).sum(-1, keepdim=True)) / math.sqrt(query.shape[-1])
    return weights.mT @ given, inner.mT @ query, inner @ key


@attend_backward.register_fake
def _(
    given: Tensor, output: Tensor, stats: Tensor, query: Tensor, key: Tensor, value: Tensor, looks_left: bool,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(value), torch.empty_like(key), torch.empty_like(query)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    query, key, value, *ctx.options = inputs
    ctx.save_for_backward(output[1], output[0], query, key, value)


def _differentiate(ctx, _, given: Tensor):  # type: ignore[no-untyped-def]
    dv, dk, dq = attend_backward(given, *ctx.saved_tensors, *ctx.options)
    return dq, dk, dv, None, None


attend.register_autograd(_differentiate, setup_context=_save)


# ---- the entry ----

FORWARD, BACKWARD = "another_library::attend", "another_library::attend_backward"


def find(graph: Graph) -> Iterator[Found]:
    """The calls of the library in a graph; see `Entry`."""
    for node in graph.nodes:
        name = op_name(node)
        if name != BACKWARD and not (name == FORWARD and is_alone(node, {BACKWARD})):
            continue
        if bind(node)["softcap"]:
            fallback, args = Fallback(Reason.UNSUPPORTED_OP, "a softcap"), bind(node)
            tensors = tensors_of([args[each] for each in ("query", "key", "value")])
            yield Refusal(node, name, fallback, name == BACKWARD, tensors)
        elif name == FORWARD:
            yield Attention(_forward(node), None, FORWARD)
        else:
            yield _with_backward(node)


def _with_backward(node: Node) -> Attention:
    backward = Backward(
        node,
        _inputs(node),
        grad_out=View(Argument(node, "given")),
        out=View(Argument(node, "output")),
        logsumexp=Argument(node, "stats"),
        gradients=(Output(node, 2), Output(node, 1), Output(node, 0)),
    )
    forward = origin(bind(node)["stats"]).args[0]
    is_here = isinstance(forward, Node) and op_name(forward) == FORWARD
    return Attention(_forward(forward) if is_here else None, backward, FORWARD)


def _forward(node: Node) -> Forward:
    return Forward(node, _inputs(node), out=Output(node, 1), logsumexp=Output(node, 0))


def _inputs(node: Node) -> Inputs:
    band = Band(0, None) if bind(node)["looks_left"] else Band()
    query, key, value = (View(Argument(node, name)) for name in ("query", "key", "value"))
    return Inputs(query, key, value, scale=None, dropout=0.0, flags=band, band=lambda: band)
