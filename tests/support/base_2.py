"""An operator whose log-sum-exp, in base 2, has a gradient, and the entry that finds it: by exact math.

Tensors are [batch, heads, length, head dim].  The backward has no kernel: only a graph that is replaced can run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from dash_inductor.frontends.attention import Attention, Backward, Forward, Found, Gradient, Inputs, Output, View
from dash_inductor.frontends.logsumexp import LogSumExp
from dash_inductor.graph.nodes import Argument, bind, op_name, origin
from dash_inductor.model.mask import Band


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / math.sqrt(q.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(hidden & causal, -math.inf)


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp, in the dtype of q."""
    scores = _scores(q, k, causal)
    out = torch.softmax(scores, -1) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return out, torch.logsumexp(scores, -1) / math.log(2)


@torch.library.custom_op("base_2::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = exact(q.double(), k.double(), v.double(), causal)
    return out.to(q.dtype), lse.float()


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("base_2::attend_backward", mutates_args=())
def attend_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError


@attend_backward.register_fake
def _(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class Function(torch.autograd.Function):
    """The call of a program."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse = attend(q, k, v, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal = causal
        return out, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
        return *attend_backward(do, *ctx.saved_tensors, grad_lse, ctx.causal), None


def find(graph: Graph) -> Iterator[Found]:
    """The entry."""
    for node in graph.nodes:
        if op_name(node) == "base_2::attend_backward":
            forward = origin(bind(node)["out"]).args[0]
            assert isinstance(forward, Node)
            wanted = bind(node)["grad_lse"] is not None
            backward = Backward(
                node,
                _inputs(node),
                grad_out=View(Argument(node, "do")),
                out=View(Argument(node, "out")),
                logsumexp=None,
                gradients=(Output(node, 0), Output(node, 1), Output(node, 2)),
                grad_logsumexp=Gradient(Argument(node, "grad_lse"), 1 / math.log(2)) if wanted else None,
            )
            sums = LogSumExp(forward, 1, base=2.0)
            yield Attention(Forward(forward, _inputs(forward), Output(forward, 0), sums), backward, "base_2::attend")


def _inputs(node: Node) -> Inputs:
    query, key, value = (View(Argument(node, name)) for name in "qkv")
    band = Band(0, None) if bind(node)["causal"] else Band()
    return Inputs(query, key, value, None, 0.0, flags=band, band=lambda: band)
