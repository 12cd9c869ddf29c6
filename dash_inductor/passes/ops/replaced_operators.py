"""Replaces single operators by other nodes; an error leaves an operator as it was, and is recorded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from torch.fx import Node

from ...errors import described
from ...graph.emit import Emitter, erase_dead
from ...graph.model_line import model_line
from ...graph.nodes import op_name
from ...records.records import Record

log = logging.getLogger("dash_inductor")


def has_failed(rewrite: str, node: Node) -> bool:
    """Returns whether an error has left the operator as it was, in an earlier run of the pass."""
    return _mark(rewrite) in node.meta


def replaced(
    rewrite: str, node: Node, facts: Mapping[str, object], detail: str, make: Callable[[Emitter], Mapping[Node, Node]]
) -> Record:
    """Replace the results of one operator; returns its record.

    Args:
        rewrite: the name of the pass.
        facts: the facts of the record.
        detail: the replacement in words, for the record.
        make: emits the new nodes; returns them by the results that they replace.
    """
    emitter, error = Emitter(node.graph), ""
    line, module = model_line([node, *node.users])
    name, op = node.name, op_name(node)
    try:
        made = make(emitter)
    except Exception as raised:
        log.debug("%s", node, exc_info=raised)
        emitter.discard()
        node.meta[_mark(rewrite)] = True
        error = described(raised)
    else:
        for result, new in made.items():
            result.replace_all_uses_with(new)
        erase_dead(node.graph, [*made])
    return Record.of_attempt(
        error,
        rewrite=rewrite,
        name=name,
        op=op,
        detail=detail,
        line=line,
        module=module,
        facts=dict(facts),
    )


def _mark(rewrite: str) -> str:
    """Returns the key in the metadata of an operator that an error has left as it was."""
    return f"dash_inductor_{rewrite}"
