"""Puts `attention_forward` and `attention_backward` in the place of a forward and its backwards."""

from __future__ import annotations

import dataclasses
import logging
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ...entries.biases import Bias
from ...entries.repeat_kv import Repeat
from ...graph.emit import Emitter, erase_dead
from ...graph.model_line import model_line, site_text
from ...operators.attention import attention_backward, attention_backward_with_bias, attention_forward
from ...upstream.partitioner import stand_for
from .data_masks import DataMask, needs_tables
from .extras import extras
from .operands import Gradient, output
from .sites import Match, out_order

log = logging.getLogger("dash_inductor")
aten, prims = torch.ops.aten, torch.ops.prims


def replace(graph: Graph, forward: Node | None, matches: Sequence[Match]) -> None:
    """Replace the backwards of `matches`, and `forward` too unless it is None; or a forward that is alone.

    Either everything is replaced or, if anything raises, the graph is as it was.
    """
    emitter = Emitter(graph)
    swaps: list[tuple[Node, Node]] = []
    try:
        inputs = results = None
        if forward is not None:
            inputs = _inputs(emitter, matches[0], before=forward)
            results = _new_forward(emitter, forward, matches[0], inputs, swaps)
        for match in matches:
            if match.has_backward:
                own = inputs or _inputs(emitter, match, before=match.node)
                _new_backward(emitter, match, own, results, swaps)
        for old, new in swaps:
            old.replace_all_uses_with(new)
    except BaseException:
        for old, new in swaps:  # nothing else reads a new node of these, so what reads one read the old node before
            new.replace_all_uses_with(old)
        emitter.discard()
        raise
    _erase_replaced(graph, forward, matches, [old for old, _ in swaps])


def _erase_replaced(graph: Graph, forward: Node | None, matches: Sequence[Match], swapped: list[Node]) -> None:
    """Erase what the new nodes stand for.  Nothing reads it any more, so an error here leaves a sound graph."""
    replaced = [*([] if forward is None else [forward]), *(match.node for match in matches)]
    dead = [*swapped, *(node for old in replaced for node in (old, *old.users))]
    try:
        erase_dead(graph, dead, also=frozenset(replaced))
    except Exception as error:
        log.warning("nodes that nothing reads stay in the graph: %s", error, exc_info=error)


def _new_forward(
    emitter: Emitter, forward: Node, match: Match, inputs: _Inputs, swaps: list[tuple[Node, Node]]
) -> tuple[Node | None, Node | None]:
    """The new forward; returns its output and its log-sum-exp, None where nothing reads them."""
    order = out_order(match.backend, forward)
    assert order is not None  # `cause_to_keep` looked at it
    call = dataclasses.replace(match.site.call, orders=(order,))
    extras = inputs.extras + ([] if inputs.data is None else inputs.data.of_forward(forward))
    arguments: tuple[Any, ...] = (*inputs.operands, extras, str(call), str(match.plan), site_text(match.node))
    name = _node_name("dash_forward", forward)
    node = emitter.call(attention_forward, arguments, before=forward, like=forward, name=name)
    stand_for(node, forward)
    out = logsumexp = None
    for user in forward.users:
        if user.args[1] == 0:
            out = emitter.call(operator.getitem, (node, 0), before=forward, like=user)
            swaps.append((user, out))
        elif user.args[1] == 1:
            logsumexp = emitter.call(operator.getitem, (node, 1), before=forward, like=user)
    return out, logsumexp


def _new_backward(
    emitter: Emitter,
    match: Match,
    inputs: _Inputs,
    results: tuple[Node | None, Node | None] | None,
    swaps: list[tuple[Node, Node]],
) -> None:
    """The new backward; `results` are the new forward's, None if the old forward stays."""
    old, args = match.node, match.args
    if results is not None:
        logsumexp = results[1]
    else:
        logsumexp = args["logsumexp"]
        assert isinstance(logsumexp, Node)
        if logsumexp.meta["val"].dim() == 4:  # cuDNN: [B, H, Sq, 1]
            logsumexp = emitter.call(aten.squeeze.dim, (logsumexp, 3), before=old, like=logsumexp)
    gradients = match.operands.gradients
    orders = tuple(gradient.order for gradient in gradients if gradient.order is not None)  # `analyse` saw them all
    call = dataclasses.replace(match.site.call, orders=orders)
    grad_out, out, extras = args[match.backend.grad_out], args["out"], inputs.extras
    assert isinstance(grad_out, Node)
    assert isinstance(out, Node)
    if inputs.data is not None:
        extras = extras + inputs.data.of_backward(old)
    arguments: tuple[Any, ...] = (
        grad_out,
        *inputs.operands,
        out,
        logsumexp,
        extras,
        str(call),
        str(match.plan),
        site_text(old),
    )
    bias, name = match.bias, _node_name("dash_backward", old)
    if bias is None or bias.gradient is None:
        node = emitter.call(attention_backward, arguments, before=old, like=old, name=name)
    else:
        arguments = (*arguments, list(bias.summed))
        node = emitter.call(attention_backward_with_bias, arguments, before=old, like=old, name=name)
    _lead_to_model(node, match)
    if bias is not None and bias.gradient is not None:
        swaps.append((bias.gradient, _bias_gradient(emitter, match, bias, node)))
    repeats = (None, *(match.operands.repeats or (None, None)))
    for index, (gradient, repeat) in enumerate(zip(gradients, repeats, strict=True)):
        used = output(old, index)
        if used is not None:
            result = emitter.call(operator.getitem, (node, index), before=old, like=used)
            swaps.append(_consumer(emitter, used, result, gradient, repeat, before=old))


def _node_name(kind: str, old: Node) -> str:
    """A name that tells the module of the model that a node is of: generated code and Inductor's provenance show it."""
    return "_".join([kind, *re.findall(r"\w+", model_line([old, *old.users])[1])])


def _lead_to_model(backward: Node, match: Match) -> None:
    """Let Inductor's provenance lead from a backward to the model's call.

    PyTorch notes the node of Dynamo's graph that another one is made from in the forward alone.
    """
    forward = match.backend.forward_of(match.node)
    if forward is not None and "from_node" in forward.meta:
        backward.meta.setdefault("from_node", forward.meta["from_node"])


def _bias_gradient(emitter: Emitter, match: Match, bias: Bias, backward: Node) -> Node:
    """The new gradient of the bias, of the new backward, where the old one is."""
    assert bias.gradient is not None
    node = emitter.call(operator.getitem, (backward, 3), before=match.node, like=bias.gradient)
    if bias.rest:
        arguments = (node, list(bias.rest), True)
        node = emitter.call(aten.sum.dim_IntList, arguments, before=match.node, like=bias.gradient)
    return node


def _consumer(
    emitter: Emitter, used: Node, result: Node, gradient: Gradient, repeat: Repeat | None, before: Node
) -> tuple[Node, Node]:
    """The nodes that the rest of the graph reads: the old node and the one that takes its place."""
    if gradient.reduction is None or repeat is None:
        return used, result
    total = gradient.reduction.total
    dtype = total.meta["val"].dtype
    if dtype != repeat.dtype:
        result = emitter.call(prims.convert_element_type.default, (result, dtype), before=before, like=total)
    if repeat.perm != (0, 1, 2, 3):
        inverse = [repeat.perm.index(d) for d in range(4)]
        result = emitter.call(aten.permute.default, (result, inverse), before=before, like=total)
    if gradient.reduction.keepdim:
        result = emitter.call(aten.unsqueeze.default, (result, repeat.head + 1), before=before, like=total)
    return total, result


@dataclass(frozen=True)
class _Inputs:
    """The tensors that forward and backward read.

    operands: query, key and value; extras: the tensors that the call names by their place; data: the tables of the
    mask, where the kernels walk by tables.
    """

    operands: tuple[Node, Node, Node]
    extras: list[Node]
    data: DataMask | None


def _inputs(emitter: Emitter, match: Match, before: Node) -> _Inputs:
    """The inputs in front of `before`; key and value without their repeats where the match says so."""
    operands = match.operands
    key, value = operands.key, operands.value
    if operands.repeats is not None:
        key, value = (_unrepeated(emitter, repeat, before) for repeat in operands.repeats)
    query, of_mask = operands.query, extras(emitter, match, before)
    if not needs_tables(match):
        return _Inputs((query, key, value), of_mask, None)
    data = DataMask.build(emitter, match, of_mask, before)
    return _Inputs((query, key, value), of_mask, data)


def _unrepeated(emitter: Emitter, repeat: Repeat, before: Node) -> Node:
    node = repeat.base
    if node.meta["val"].dtype != repeat.dtype:
        node = emitter.call(prims.convert_element_type.default, (node, repeat.dtype), before=before, like=repeat.base)
    if repeat.squeeze is not None:
        node = emitter.call(aten.squeeze.dim, (node, repeat.squeeze), before=before, like=repeat.base)
    if repeat.perm != (0, 1, 2, 3):
        node = emitter.call(aten.permute.default, (node, list(repeat.perm)), before=before, like=repeat.base)
    return node
