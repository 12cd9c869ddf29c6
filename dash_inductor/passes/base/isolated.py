"""Applies passes one by one, each isolated from the errors of the others.

If a pass raises an unexpected exception, the graph is restored to its state before that pass, and the exception is
recorded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from torch.fx import Graph

from ... import failures
from ...config import config
from ...graph.undo import Undo
from ...model.reasons import Reason
from ...records.records import Record
from .rewrite import Result, Rewrite


def apply(graph: Graph, rewrites: Sequence[Rewrite]) -> Iterator[Result]:
    """Applies the passes that are switched on, in order, and yields the `Result` of each site.

    If a pass raises, its changes of the graph are undone, and its sites are recorded as fallbacks.

    Raises:
        Exception: the exception of a pass, if `config.strict` is set.
    """
    undo = Undo(graph)
    for rewrite in rewrites:
        try:
            results = rewrite.apply(graph) if rewrite.is_on(config) else ()
        except Exception as error:
            text = failures.caught(_name(rewrite), error, recorded=True)
            undo.restore()
            results = _left(graph, rewrite, text)
        if results:
            undo = Undo(graph)
        yield from results


def leave(graph: Graph, cause: str, rewrites: Sequence[Rewrite]) -> Iterator[Result]:
    """Yields a fallback `Result` for each site that the passes find in a graph on which none of them runs.

    Only passes that are switched on are asked, by `Rewrite.leave`.

    Args:
        graph: the graph.
        cause: the settings of Inductor because of which no pass runs, for the records.
        rewrites: the passes.

    Raises:
        Exception: the exception of a pass, if `config.strict` is set.
    """
    for rewrite in rewrites:
        undo = Undo(graph)
        try:
            yield from rewrite.leave(graph, cause) if rewrite.is_on(config) else ()
        except Exception as error:
            text = failures.caught(_name(rewrite), error, recorded=True)
            undo.restore()
            yield _failed(rewrite, text)


def _left(graph: Graph, rewrite: Rewrite, text: str) -> Sequence[Result]:
    """Returns a fallback for every site of a pass that failed; a single result if its `leave` fails, too."""
    undo = Undo(graph)
    try:
        left = rewrite.leave(graph, text)
    except Exception:
        undo.restore()
        left = ()
    results = [
        Result(dataclasses.replace(result.record, reason=Reason.INTERNAL_ERROR), result.asked_for)
        if result.record.reason is Reason.PASSES_OFF
        else result
        for result in left
    ]
    return results or [_failed(rewrite, text)]


def _failed(rewrite: Rewrite, text: str) -> Result:
    return Result(Record(rewrite.name, "", "", "fallback", Reason.INTERNAL_ERROR, text))


def _name(rewrite: Rewrite) -> str:
    return f"the rewrite {rewrite.name!r}"
