"""Decides whether an attention's forward is replaced, too, when its backward is replaced."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from ...config import config
from ...frontends.attention import Forward, Inputs
from ...frontends.logsumexp import cause_of_results
from ...graph.nodes import Argument, origin
from ...model.operands import ADDED
from .match import Match


def cause_of_fallback(forward: Forward | None, matches: Sequence[Match]) -> str:
    """Returns in words why an attention's forward is left to PyTorch; "" if it can be replaced.

    Args:
        forward: the forward; None if it is not in this graph.
        matches: the backwards to be replaced that read this forward's results, or the forward itself if it has none.
    """
    if forward is None:
        merged = any(match.attention.backward is not None and match.attention.backward.merged for match in matches)
        return "its output and log-sum-exp are merged from several" if merged else "not in this graph"
    if config.forward == "keep":
        return "by the setting forward='keep'"
    if len({_call(match) for match in matches}) > 1:
        return "several backwards of one forward differ"
    own, all_inputs = forward.inputs, [match.attention.inputs for match in matches]
    if any(_tensors(own) != _tensors(inputs) for inputs in all_inputs):
        return "forward and backward have different operands"
    if any(own.dropout != match.attention.inputs.dropout or not _draws(forward, match) for match in matches):
        return "forward and backward have different dropout"
    if any(_value(own.mask) is not _value(inputs.mask) for inputs in all_inputs):
        return "forward and backward have different masks"
    if any(_added(own) != _added(inputs) or own.modifiers != inputs.modifiers for inputs in all_inputs):
        return "forward and backward change scores in different ways"
    if any(_factors(own) != _factors(inputs) for inputs in all_inputs):
        return "forward and backward multiply scores by different factors"
    if any(_documents(own) != _documents(inputs) for inputs in all_inputs):
        return "forward and backward have different documents or windows"
    cause = cause_of_results(forward, matches[0].site.spec, {match.node for match in matches})
    if cause:
        return cause
    if forward.order is None:
        return "its output is not dense"
    return ""


def _tensors(inputs: Inputs) -> tuple[object, ...]:
    return tuple(origin(view.node) for view in (inputs.query, inputs.key, inputs.value))


def _draws(forward: Forward, match: Match) -> bool:
    """Whether the backward uses this forward's random state for dropout; also True without dropout or backward."""
    backward = match.attention.backward
    if match.site.dropout is None or backward is None:
        return True
    states = [origin(state.value) for state in backward.random_state]
    return all(state.target is operator.getitem and state.args[0] is forward.node for state in states)


def _value(argument: Argument | None) -> object:
    return None if argument is None else origin(argument.value)


def _added(inputs: Inputs) -> list[object]:
    """The tensors that are added to scores."""
    return [_value(getattr(inputs, name)) for name in ADDED]


def _factors(inputs: Inputs) -> tuple[object, ...]:
    return _value(inputs.factors.query), _value(inputs.factors.key)


def _documents(inputs: Inputs) -> tuple[object, ...]:
    """What determines the mask of a packed (varlen) attention: its offset tensors and its band."""
    if inputs.documents is None:
        return ()
    return (*map(origin, inputs.data), inputs.band())


def _call(match: Match) -> tuple[object, ...]:
    tensors = None if match.bias is None else match.bias.tensor, *_added(match.attention.inputs)
    planned = str(match.site.spec.of_forward), str(match.plan)
    return (*planned, match.operands.repeats, match.components, tensors, _factors(match.attention.inputs))
