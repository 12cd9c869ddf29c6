"""The forward of a site: whether `dash_inductor::attention_forward` may take its place."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from ...config import config
from ...entries.varlen import band
from ...graph.nodes import origin
from .sites import Match, only_output_used, out_order


def cause_to_keep(forward: Node | None, matches: Sequence[Match]) -> str:
    """Why the forward of these backwards stays as PyTorch had it; "" if it is replaced.

    All backwards that are replaced and that read this forward's outputs must be given.
    """
    if forward is None:
        return "not in this graph"
    if config.forward == "keep":
        return "by the setting forward='keep'"
    if len({_call(match) for match in matches}) > 1:
        return "several backwards of one forward differ"
    backend = matches[0].backend
    bound = backend.arguments(forward)
    operands = ("query", "key", "value")
    if any(origin(bound[name]) is not origin(match.args[name]) for match in matches for name in operands):
        return "forward and backward have different operands"
    if any(bound["dropout_p"] != match.args["dropout_p"] or not _draws(forward, match) for match in matches):
        return "forward and backward have different dropout"
    mask = backend.mask
    if mask is not None and not all(_same(bound[mask], match.args[mask]) for match in matches):
        return "forward and backward have different masks"
    if backend.packed and any(_documents(bound) != _documents(match.args) for match in matches):
        return "forward and backward have different documents or windows"
    if not only_output_used(forward, {match.node for match in matches}):
        return "log-sum-exp or random state has other users"
    if out_order(backend, forward) is None:
        return "its output is not dense"
    return ""


def _draws(forward: Node, match: Match) -> bool:
    """Whether the random numbers of the backward's dropout, if it has one, are those of this forward."""
    if match.site.dropout is None:
        return True
    states = [origin(match.args[name]) for name in match.backend.random_state]
    return all(state.target is operator.getitem and state.args[0] is forward for state in states)


def _documents(args: dict[str, Any]) -> tuple[object, ...]:
    """The facts that decide, for a packed call, who sees whom."""
    return origin(args["cu_seq_q"]), origin(args["cu_seq_k"]), band(args)


def _call(match: Match) -> tuple[object, ...]:
    bias = None if match.bias is None else match.bias.tensor
    return (str(match.site.call), str(match.plan), match.operands.repeats, match.terms, bias)


def _same(a: Node | None, b: Node | None) -> bool:
    return a is b if a is None or b is None else origin(a) is origin(b)
