"""Applies passes one by one, each isolated from the errors of the others.

An unexpected exception of a pass leaves the graph as it was before that pass, and is recorded.
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
    """Applies the passes that are switched on, in order, and yields their results.

    Raises:
        Exception: the exception of a pass, if `strict` is set.
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
    """Yields the results of `Rewrite.leave` of the passes that are switched on.

    Raises:
        Exception: the exception of a pass, if `strict` is set.
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
