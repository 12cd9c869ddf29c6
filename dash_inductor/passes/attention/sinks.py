"""Gradients of attention sinks (as in gpt-oss): extra scores that take part in the softmax and have no key or value.

The forward operator reads the sinks.  Given its output and log-sum-exp L, the backward operator needs no change for the
gradients of query, key, value and bias.  The gradient of a sink s is the sum of -exp(s - L) * rowsum(grad_out * output)
over its rows.  The backward computes these row sums (delta) anyway, and returns them.

With a bias, the log-sum-exp has two parts (Note [Log-sum-exp in two parts] in kernels/portable/device/tiles.py): first
the maximum of all scores and the sink, second the base-2 logarithm of the sum relative to that maximum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ...frontends.attention import Sink
from ...graph import sizes
from ...graph.emit import Emitter
from ...graph.nodes import bind, op_name

aten, prims = torch.ops.aten, torch.ops.prims

_END = 2**63 - 1
"""The end of a slice that extends to the end of its dimension."""


def rows_of_sinks(emitter: Emitter, sinks: Node, before: Node) -> Node:
    """Inserts the sinks as the operators read them: fp32 [batch, heads, q_len], with size 1 where they are expanded.

    Args:
        emitter: inserts the nodes.
        sinks: the graph's sinks, [batch, heads, q_len, 1]; dimensions with stride 0 are cut to size 1.
        before: the node before which nodes are inserted.
    """

    def call(target: Callable[..., Any], *args: Any) -> Node:
        return emitter.call(target, args, before=before, like=before)

    sinks = call(aten.squeeze.dim, sinks, 3)
    for dim, stride in enumerate(sinks.meta["val"].stride()):
        if sizes.static(stride) == 0:
            sinks = call(aten.slice.Tensor, sinks, dim, 0, 1)
    return _in_fp32(call, sinks)


def gradient_of_sinks(emitter: Emitter, delta: Node, logsumexp: Node, sinks: Node, before: Node) -> Node:
    """Inserts the gradient of the sinks, fp32 [batch, heads, q_len, 1], not yet summed over rows; returns its node.

    Args:
        emitter: inserts the nodes.
        delta: rowsum(grad_out * output), as the backward operator returns it, [batch, heads, q_len].
        logsumexp: the log-sum-exp, in which the sinks are included, [batch, heads, q_len].
        sinks: the graph's sinks, which broadcast to [batch, heads, q_len, 1].
        before: the node before which nodes are inserted.
    """

    def call(target: Callable[..., Any], *args: Any) -> Node:
        return emitter.call(target, args, before=before, like=before)

    delta, logsumexp = (call(aten.unsqueeze.default, rows, 3) for rows in (delta, logsumexp))
    share = call(aten.exp.default, call(aten.sub.Tensor, _in_fp32(call, sinks), logsumexp))
    return call(aten.neg.default, call(aten.mul.Tensor, share, delta))


def gradient_beside_bias(
    emitter: Emitter, grad_out: Node, out: Node, logsumexp: Node, sinks: Node, before: Node
) -> Node:
    """Inserts the gradient of the sinks for an attention that also has a bias; returns its node.

    The result is fp32 [batch, heads, q_len, 1], as without a bias (`gradient_of_sinks`).  But the log-sum-exp has two
    parts (see the module), and delta is computed here, from `grad_out` and `out`.
    """

    def call(target: Callable[..., Any], *args: Any) -> Node:
        return emitter.call(target, args, before=before, like=before)

    products = call(aten.mul.Tensor, _in_fp32(call, grad_out), _in_fp32(call, out))
    delta = call(aten.sum.dim_IntList, products, [3], True)
    most, total = _parts(call, logsumexp, emitter.size(out, 2, before=before, like=before))
    share = call(aten.sub.Tensor, _in_base_2(call, call(aten.sub.Tensor, _in_fp32(call, sinks), most)), total)
    return call(aten.neg.default, call(aten.mul.Tensor, call(aten.exp2.default, share), delta))


def _parts(call: Callable[..., Node], logsumexp: Node, length: int | Node) -> tuple[Node, Node]:
    """Splits a two-part log-sum-exp into its parts, each [batch, heads, q_len, 1]."""
    both = call(aten.unsqueeze.default, logsumexp, 3)
    return call(aten.slice.Tensor, both, 2, 0, length), call(aten.slice.Tensor, both, 2, length, _END)


def _in_base_2(call: Callable[..., Node], node: Node) -> Node:
    return call(aten.mul.Tensor, node, math.log2(math.e))


def put_sink_gradient(emitter: Emitter, sink: Sink, column: Node, before: Node) -> list[tuple[Node, Node]]:
    """Inserts what the program reads instead of the old gradient of the sinks.

    If the program only sums that gradient, the sum is computed in fp32 and then cast to its dtype.

    Args:
        emitter: inserts the nodes.
        sink: the old gradient in the graph.
        column: the new gradient, fp32 [batch, heads, q_len, 1].
        before: the node before which nodes are inserted.

    Returns:
        Pairs (old, new): the caller makes the readers of each old node read the new one.
    """
    users, used = sink.users, sink.used
    assert used is not None
    if len(users) == 1 and op_name(users[0]) == "aten::sum" and sink.axes == "bhsd":
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
