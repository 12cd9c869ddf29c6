"""Replaces an attention forward and its backwards in a graph by `attention_forward` and `attention_backward` nodes."""

from __future__ import annotations

import dataclasses
import functools
import logging
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ...frontends.attention import Backward, Forward, Output, View, between
from ...frontends.logsumexp import LogSumExp, gradient_of
from ...graph.emit import Emitter, erase_dead
from ...graph.model_line import model_line, site_text
from ...graph.nodes import origin
from ...operators.attention import attention_backward, attention_forward
from ...upstream.partitioner import stand_for
from .data_masks import MaskTableNodes, needs_tables
from .extras import extras
from .factors import gradient_of_factor, multiplied
from .match import Match
from .saved import unwatched
from .sinks import gradient_beside_bias, gradient_of_sinks, put_sink_gradient, rows_of_sinks

log = logging.getLogger("dash_inductor")
aten = torch.ops.aten

_SIDES = {"query": 0, "key": 1}
"""The index of the operand that a factor of the scores multiplies, which is also that of its gradient."""


def replace(graph: Graph, forward: Forward | None, matches: Sequence[Match]) -> None:
    """Replaces attentions in a graph by dash_inductor's operators.  If anything raises, the graph is left as it was.

    Args:
        graph: the graph.
        forward: the forward to replace, shared by all `matches`; None if it is left to PyTorch.
        matches: the attentions whose backwards are replaced, or `forward` alone if it has no backward.
    """
    emitter = Emitter(graph)
    swaps: list[tuple[Node, Node]] = []
    try:
        inputs, out, logsumexp = None, None, None
        if forward is not None:
            inputs = _inputs(emitter, matches[0], before=forward.node)
            out, logsumexp = _new_forward(emitter, forward, matches, inputs, swaps)
        for match in matches:
            backward = match.attention.backward
            if backward is not None:
                own = inputs or _inputs(emitter, match, before=match.node)
                of_pytorch = None if forward is not None else _pytorch_logsumexp(emitter, backward)
                results = (
                    out if backward.out is None else _output(emitter, backward.out, match.node, swaps),
                    of_pytorch or logsumexp,
                )
                _new_backward(emitter, match, backward, own, results, swaps)
        for old, new in swaps:
            old.replace_all_uses_with(new)
    except BaseException:
        for old, new in swaps:  # only swapped readers read these new nodes, so this restores what they read before
            new.replace_all_uses_with(old)
        emitter.discard()
        raise
    _erase_replaced(graph, forward, matches, [old for old, _ in swaps])


def _erase_replaced(graph: Graph, forward: Forward | None, matches: Sequence[Match], swapped: list[Node]) -> None:
    """Erases the replaced nodes.  Nothing reads them any more, so an error here leaves a valid graph."""
    own = [] if forward is None else [forward.node, *forward.draws]
    replaced = [*own, *(match.node for match in matches)]
    dead = [*swapped, *(node for old in replaced for node in (old, *old.users))]
    try:
        erase_dead(graph, dead, also=frozenset(replaced))
    except Exception as error:
        log.warning("nodes that nothing reads stay in the graph: %s", error, exc_info=error)


def _new_forward(
    emitter: Emitter, forward: Forward, matches: Sequence[Match], inputs: _Inputs, swaps: list[tuple[Node, Node]]
) -> tuple[Node | None, Node | None]:
    """Inserts the new forward, and appends to `swaps` the nodes whose readers shall read its results.

    Returns:
        Its output if the old forward's result is a plain node (decomposed SDPA), else None; and its log-sum-exp, None
        if nothing reads it.
    """
    match, old, order = matches[0], forward.node, forward.order
    assert order is not None  # `cause_of_fallback` looked at it
    spec = dataclasses.replace(match.site.spec.of_forward, orders=(order,))
    sinks = match.attention.inputs.sinks
    extras = inputs.extras + ([] if sinks is None else [rows_of_sinks(emitter, sinks.value, before=old)])
    extras += [] if inputs.data is None else inputs.data.of_forward(old)
    arguments: tuple[Any, ...] = (*inputs.operands, extras, str(spec), str(match.plan), site_text(match.node))
    name = _node_name("dash_forward", old)
    node = emitter.call(attention_forward, arguments, before=old, like=old, name=name)
    stand_for(node, old)
    if not isinstance(forward.out, Output) or forward.logsumexp is None:
        return _plain_results(emitter, forward, match, node, swaps)
    for reader in forward.out.readers:
        result = emitter.call(operator.getitem, (node, 0), before=old, like=reader)
        swaps.append((reader, between(emitter, result, forward.out.axes, old)))
    readers = forward.logsumexp.readers
    if not readers:
        return None, None
    logsumexp = emitter.call(operator.getitem, (node, 1), before=old, like=readers[0])
    if forward.logsumexp.index in forward.given({match.node for match in matches}):
        own, query, documents = forward.logsumexp, inputs.operands[0], match.components.documents
        assert isinstance(own, LogSumExp)  # `cause_of_results` looked at it
        public = own.made_of(emitter, logsumexp, spec, query, documents, before=old)
        swaps += [(reader, public) for reader in readers]
    return None, logsumexp


def _plain_results(
    emitter: Emitter, forward: Forward, match: Match, node: Node, swaps: list[tuple[Node, Node]]
) -> tuple[Node, Node | None]:
    """Output and log-sum-exp of a new forward that replaces decomposed SDPA (matmul, softmax, matmul)."""
    old = forward.node
    out = emitter.call(operator.getitem, (node, 0), before=old, like=old)
    logsumexp = None
    if match.attention.has_backward:
        logsumexp = emitter.call(operator.getitem, (node, 1), before=old, like=old)
    unwatched(out)
    for size, parts, more in forward.sizes:
        arguments = [(view.node, dim) for view, dim in parts]
        found = [emitter.call(aten.sym_size.int, each, before=size, like=size) for each in arguments]
        same = functools.reduce(lambda a, b: emitter.call(operator.mul, (a, b), before=size, like=size), found)
        same = emitter.call(operator.add, (same, more), before=size, like=size) if more else same
        swaps.append((size, same))
    swap = None if forward.out.used is None else forward.out.put(emitter, out, before=old)
    if swap is not None:
        swaps.append(swap)
    return out, logsumexp


def _pytorch_logsumexp(emitter: Emitter, backward: Backward) -> Node:
    """The log-sum-exp of a forward that is left to PyTorch, as [batch, heads, >= q_len]."""
    assert backward.logsumexp is not None  # otherwise the site needs our forward
    logsumexp: Node = backward.logsumexp.value
    if logsumexp.meta["val"].dim() == 4:
        logsumexp = emitter.call(aten.squeeze.dim, (logsumexp, 3), before=backward.node, like=logsumexp)
    return logsumexp


def _new_backward(
    emitter: Emitter,
    match: Match,
    backward: Backward,
    inputs: _Inputs,
    results: tuple[Node | None, Node | None],
    swaps: list[tuple[Node, Node]],
) -> None:
    """Inserts the new backward, and appends to `swaps` the nodes whose readers shall read its gradients.

    Args:
        results: the forward's output and log-sum-exp.
    """
    old, (out, logsumexp) = backward.node, results
    gradients = match.operands.gradients
    orders = tuple(gradient.order for gradient in gradients if gradient.order is not None)  # `analyse` checked them
    spec = dataclasses.replace(match.site.spec.of_backward, orders=orders)
    bias, extras = match.bias, inputs.extras
    if spec.bias is not None and bias is not None:
        spec = dataclasses.replace(spec, bias=dataclasses.replace(spec.bias, summed=tuple(bias.summed)))
    sinks, sink_gradient = match.attention.inputs.sinks, backward.sink_gradient
    of_sinks = sinks is not None and sink_gradient is not None and sink_gradient.used is not None
    spec = dataclasses.replace(spec, delta=of_sinks and not spec.traits.biased)
    if backward.grad_logsumexp is not None:
        assert logsumexp is not None
        gradient = gradient_of(emitter, backward.grad_logsumexp, logsumexp, inputs.operands[0], before=old)
        extras = [*extras, gradient]
    if inputs.data is not None:
        extras = extras + inputs.data.of_backward(old)
    arguments: tuple[Any, ...] = (
        between(emitter, backward.grad_out.node, backward.grad_out.axes, old),
        *inputs.operands,
        out,
        logsumexp,
        extras,
        str(spec),
        str(match.plan),
        site_text(old),
    )
    name = _node_name("dash_backward", old)
    node = emitter.call(attention_backward, arguments, before=old, like=old, name=name)
    _lead_to_model(node, match)
    if bias is not None and bias.gradient is not None:
        result = emitter.call(operator.getitem, (node, 3), before=old, like=bias.gradient)
        swaps += bias.put(emitter, result, before=old)
    if of_sinks and sinks is not None and sink_gradient is not None:
        assert out is not None
        assert logsumexp is not None
        if spec.delta:
            delta = emitter.call(operator.getitem, (node, 3), before=old, like=old)
            column = gradient_of_sinks(emitter, delta, logsumexp, sinks.value, before=old)
        else:
            column = gradient_beside_bias(emitter, backward.grad_out.node, out, logsumexp, sinks.value, before=old)
        swaps += put_sink_gradient(emitter, sink_gradient, column, before=old)
    factors = match.attention.inputs.factors
    for index, (sink, factor) in enumerate(zip(gradients, (factors.query, factors.key, None), strict=True)):
        used, of_factor = sink.used, [found for found in match.factor_gradients if _SIDES[found.side] == index]
        if used is None and not of_factor:
            continue
        result = emitter.call(operator.getitem, (node, index), before=old, like=old if used is None else used)
        if of_factor:
            rows = gradient_of_factor(emitter, result, inputs.before_factors[index], before=old)
            swaps += [found.put(emitter, rows, before=old) for found in of_factor]
        if used is not None:
            swap = sink.put(emitter, multiplied(emitter, result, factor, before=old), before=old)
            swaps += [] if swap is None else [swap]


def _output(emitter: Emitter, view: View, before: Node, swaps: list[tuple[Node, Node]]) -> Node:
    """The forward's output that a new backward reads: the new forward's if the forward was replaced."""
    out, axes = view.node, view.axes
    if axes == "bshd":
        out = next((new for old, new in swaps if old is origin(out)), out)
    return between(emitter, out, axes, before)


def _node_name(kind: str, old: Node) -> str:
    """A node name that contains the model's module path; generated code and Inductor's provenance show it."""
    return "_".join([kind, *re.findall(r"\w+", model_line([old, *old.users])[1])])


def _lead_to_model(backward: Node, match: Match) -> None:
    """Copies the forward's ``from_node`` metadata to a backward, so that Inductor's provenance names the model's call.

    PyTorch itself sets ``from_node`` (the originating node of Dynamo's graph) on forward nodes only.
    """
    forward = match.attention.forward
    if forward is not None and "from_node" in forward.node.meta:
        backward.meta.setdefault("from_node", forward.node.meta["from_node"])


@dataclass(frozen=True)
class _Inputs:
    """The tensors that forward and backward read.

    Attributes:
        operands: query, key and value, multiplied by factors of the scores.
        before_factors: query and key before that.
        extras: the extra tensors, to which the call refers by index.
        data: the tile tables of the mask, for kernels that read tables; else None.
    """

    operands: tuple[Node, Node, Node]
    before_factors: tuple[Node, Node]
    extras: list[Node]
    data: MaskTableNodes | None


def _inputs(emitter: Emitter, match: Match, before: Node) -> _Inputs:
    """Inserts the inputs before `before`; key and value are the tensors before `repeat_kv` if the match says so."""
    operands = match.operands
    views = operands.query, operands.key, operands.value
    query, key, value = (between(emitter, view.node, view.axes, before) for view in views)
    if operands.repeats is not None:
        key, value = (repeat.read(emitter, before) for repeat in operands.repeats)
    of_mask = extras(emitter, match, before)
    has_backward = match.attention.has_backward
    data = MaskTableNodes.of(emitter, match, of_mask, before, has_backward) if needs_tables(match) else None
    factors = match.attention.inputs.factors
    by_factors = (multiplied(emitter, query, factors.query, before), multiplied(emitter, key, factors.key, before))
    return _Inputs((*by_factors, value), (query, key), of_mask, data)
