"""A net for what no entry knows: a backward of attention by its name, so that no attention is without a record."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from typing import Any

from torch.fx import Graph, Node

from ..graph.nodes import bind, called, op_name
from ..model.plan import Kept
from ..model.reasons import Reason
from .attention import OURS, Refusal, tensors_of

_ATTENTION, _BACKWARD = re.compile("attn|attention", re.IGNORECASE), re.compile("bwd|backward", re.IGNORECASE)
_NAMES = ("query", "key", "value"), ("q", "k", "v")


def find(graph: Graph, known: Set[Node]) -> Iterator[Refusal]:
    """The calls of operators whose names say that they are backwards of attention, but those that are known."""
    for node in graph.nodes:
        name = op_name(node)
        if node in known or not _ATTENTION.search(name) or not _BACKWARD.search(name) or name.startswith(OURS):
            continue
        yield Refusal(node, name, Kept(Reason.UNSUPPORTED_OP, name), True, tensors_of(_operands(node)))


def _operands(node: Node) -> list[Any]:
    """Query, key and value, where the operator calls them so."""
    if called(node) is None:
        return []
    arguments = bind(node)
    return next(([arguments[name] for name in names] for names in _NAMES if arguments.keys() >= set(names)), [])
