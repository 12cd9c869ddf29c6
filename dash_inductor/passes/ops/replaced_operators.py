"""Replaces single operators by other nodes; after an error, the operator stays and the error is recorded."""

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
    """Returns whether an earlier run of the pass named `rewrite` left the operator in the graph because of an error."""
    return _mark(rewrite) in node.meta


def replaced(
    rewrite: str, node: Node, facts: Mapping[str, object], detail: str, make: Callable[[Emitter], Mapping[Node, Node]]
) -> Record:
    """Replaces the results of one operator in its graph, and returns its record.

    If `make` raises, the operator stays in the graph, and the record contains the error.

    Args:
        rewrite: the name of the pass.
        node: the operator.
        facts: further entries of the record, such as shapes.
        detail: the replacement in words, for the record.
        make: emits the new nodes, and returns a mapping from the replaced nodes to the new ones.
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
    """Returns the key that marks, in a node's metadata, an operator that was not replaced because of an error."""
    return f"dash_inductor_{rewrite}"
