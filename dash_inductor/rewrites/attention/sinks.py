"""Sinks around the operators of attention: scores of no key, which take part in a softmax and have no value.

With the log-sum-exp L of the keys alone and a sink s, the log-sum-exp of all is L' = logaddexp(L, s), and the output is
the one of the keys times exp(L - L').  A backward that reads this output and L' gives the gradients of query, key and
value as it is, and the gradient of a sink is the sum of -exp(s - L') * rowsum(grad_out * output) over its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ...entries.attention import Sink
from ...graph.emit import Emitter
from ...graph.nodes import bind, op_name

aten, prims = torch.ops.aten, torch.ops.prims


def with_sinks(emitter: Emitter, out: Node, logsumexp: Node, sinks: Node, before: Node) -> tuple[Node, Node]:
    """Output and log-sum-exp with the sinks, [batch, heads, q_len, 1] or broadcasting to it, of those without them."""

    def call(target: Callable[..., Any], *args: Any) -> Node:
        return emitter.call(target, args, before=before, like=out)

    rows = call(aten.unsqueeze.default, logsumexp, 3)
    sinks = _in_fp32(call, sinks)
    above = call(aten.sub.Tensor, rows, sinks)
    share = call(aten.sigmoid.default, above)
    rest = call(aten.log1p.default, call(aten.exp.default, call(aten.neg.default, call(aten.abs.default, above))))
    total = call(aten.squeeze.dim, call(aten.add.Tensor, call(aten.maximum.default, rows, sinks), rest), 3)
    scaled = call(aten.mul.Tensor, _in_fp32(call, out), share)
    return call(prims.convert_element_type.default, scaled, out.meta["val"].dtype), total


def gradient_of_sinks(emitter: Emitter, grad_out: Node, out: Node, logsumexp: Node, sinks: Node, before: Node) -> Node:
    """The gradient of the sinks for each row, fp32 [batch, heads, q_len, 1], of output and log-sum-exp with them."""

    def call(target: Callable[..., Any], *args: Any) -> Node:
        return emitter.call(target, args, before=before, like=before)

    products = call(aten.mul.Tensor, _in_fp32(call, grad_out), _in_fp32(call, out))
    delta = call(aten.sum.dim_IntList, products, [3], True)
    rows = call(aten.unsqueeze.default, logsumexp, 3)
    share = call(aten.exp.default, call(aten.sub.Tensor, _in_fp32(call, sinks), rows))
    return call(aten.neg.default, call(aten.mul.Tensor, share, delta))


def put_sink_gradient(emitter: Emitter, sink: Sink, column: Node, before: Node) -> list[tuple[Node, Node]]:
    """Swaps of the nodes that the program reads; its sum of the gradient becomes one of fp32 numbers."""
    users, used = sink.users, sink.used
    assert used is not None
    if len(users) == 1 and op_name(users[0]) == "aten::sum" and used.meta["val"].dim() == column.meta["val"].dim():
        (total,) = users
        args = bind(total)
        if args.get("dim") and args.get("dtype") is None:
            arguments = (column, list(args["dim"]), args["keepdim"])
            found = emitter.call(aten.sum.dim_IntList, arguments, before=before, like=total)
            dtype = total.meta["val"].dtype
            found = emitter.call(prims.convert_element_type.default, (found, dtype), before=before, like=total)
            return [(total, found)]
    swap = sink.put(emitter, column, before)
    return [] if swap is None else [swap]


def _in_fp32(call: Callable[..., Node], node: Node) -> Node:
    if node.meta["val"].dtype == torch.float32:
        return node
    return call(prims.convert_element_type.default, node, torch.float32)
