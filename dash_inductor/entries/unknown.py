"""A net for what no entry knows: backwards of attention by name or arguments, so that none is without a record."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from typing import Any

from torch.fx import Graph, Node

from ..graph.nodes import bind, called, op_name
from ..model.plan import Kept
from ..model.reasons import Reason
from .attention import OURS, Refusal, tensors_of
from .written import given

_ATTENTION, _BACKWARD = re.compile("attn|attention", re.IGNORECASE), re.compile("bwd|backward", re.IGNORECASE)
_NAMES = ("query", "key", "value"), ("q", "k", "v")
_GRADIENTS = {"do", "dout", "d_out", "dO", "grad_out", "grad_output", "grad"}
_LOGSUMEXPS = {"lse", "softmax_lse", "logsumexp", "log_sum_exp", "L", "M"}
"""Arguments of a backward whose name says nothing: besides query, key and value, it reads one of each."""


def find(graph: Graph, known: Set[Node]) -> Iterator[Refusal]:
    """The calls of operators that are backwards of attention by their names or arguments, but those that are known."""
    for node in graph.nodes:
        name = op_name(node)
        if not name or node in known or name.startswith(OURS) or not (_by_name(name) or _by_arguments(node)):
            continue
        yield Refusal(node, name, Kept(Reason.UNSUPPORTED_OP, name), True, tensors_of(_operands(node)))


def _by_name(name: str) -> bool:
    return bool(_ATTENTION.search(name) and _BACKWARD.search(name))


def _by_arguments(node: Node) -> bool:
    names = _arguments(node)
    reads = any(names >= set(qkv) for qkv in _NAMES)
    return reads and not names.isdisjoint(_GRADIENTS) and not names.isdisjoint(_LOGSUMEXPS)


def _operands(node: Node) -> list[Any]:
    """Query, key and value, where the operator calls them so."""
    names = next((qkv for qkv in _NAMES if _arguments(node) >= set(qkv)), ())
    arguments = bind(node) if names else {}
    return [arguments.get(name) or given(node, name) for name in names]


def _arguments(node: Node) -> Set[str]:
    """The names of an operator's arguments; none of a higher-order one."""
    operator = called(node)
    return set() if operator is None else {argument.name for argument in operator._schema.arguments}
