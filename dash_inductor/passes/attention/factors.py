"""Multiplies query and key by factors of the scores, and computes the gradients of both (see `frontends.factors`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ...frontends.attention import Attention, NotReadable
from ...frontends.factors import NO_FACTORS, infinity_in
from ...graph.emit import Emitter
from ...graph.nodes import Argument
from ...model.reasons import Reason

aten, prims = torch.ops.aten, torch.ops.prims


def check_factors(attention: Attention) -> None:
    """Raises NotReadable for factors that are infinite somewhere, as far as the graph shows it, and for any in float16.

    The product of query and factor may leave the range of float16.
    """
    dtype, factors = attention.inputs.query.node.meta["val"].dtype, attention.inputs.factors
    for factor in (factors.query, factors.key):
        infinity = None if factor is None else infinity_in(factor.value)
        if infinity is not None:
            words = f"scores are multiplied by a number that is infinite or NaN somewhere ({infinity.name})"
            raise NotReadable(Reason.UNSUPPORTED_OP, f"{words}, and products of it with query or key would be NaN")
    if factors != NO_FACTORS and dtype == torch.float16:
        words = "scores are multiplied by a number that is not known: query or key times this number may lie outside of"
        raise NotReadable(Reason.DTYPE, f"{words} the range of float16")


def multiplied(emitter: Emitter, tensor: Node, factor: Argument | None, before: Node) -> Node:
    """Inserts the product of a tensor and a factor, computed in float32 and rounded once; returns its node.

    Args:
        emitter: inserts the nodes.
        tensor: query, key or the gradient of their product, [batch, heads, length, head dim].
        factor: floats that broadcast to [batch, heads, length, 1]; None returns `tensor` itself.
        before: the node before which nodes are inserted.
    """
    if factor is None:
        return tensor
    call = _caller(emitter, before)
    product = call(aten.mul.Tensor, _in_fp32(call, tensor), _in_fp32(call, factor.value))
    return call(prims.convert_element_type.default, product, tensor.meta["val"].dtype)


def gradient_of_factor(emitter: Emitter, gradient: Node, tensor: Node, before: Node) -> Node:
    """Inserts the gradient of a factor, float32 [batch, heads, length, 1], not yet summed; returns its node.

    Args:
        emitter: inserts the nodes.
        gradient: the gradient of the product of tensor and factor, [batch, heads, length, head dim].
        tensor: query or key before the multiplication.
        before: the node before which nodes are inserted.
    """
    call = _caller(emitter, before)
    products = call(aten.mul.Tensor, _in_fp32(call, gradient), _in_fp32(call, tensor))
    return call(aten.sum.dim_IntList, products, [3], True)


def _caller(emitter: Emitter, before: Node) -> Callable[..., Node]:
    def call(target: Callable[..., Any], *args: Any) -> Node:
        return emitter.call(target, args, before=before, like=before)

    return call


def _in_fp32(call: Callable[..., Node], node: Node) -> Node:
    if node.meta["val"].dtype == torch.float32:
        return node
    return call(prims.convert_element_type.default, node, torch.float32)
