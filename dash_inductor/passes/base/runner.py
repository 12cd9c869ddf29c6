"""Runs passes over a graph, one after another, and publishes the records of their sites."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Graph

from ... import _switch, failures
from ...config import config
from ...graph.nodes import is_joint
from ...model.reasons import Reason
from ...records.publication import graph_text, publish, trace_text
from ...records.records import SiteRecord
from ...upstream.inductor import stable_topological_sort
from . import isolated
from .fallback_error import fallback_error
from .results import Results
from .rewrite import Result, Rewrite


def rewrite_graph(graph: Graph, rewrites: Sequence[Rewrite]) -> bool:
    """Rewrites a graph in place with the given passes, and publishes one record for each site (see `records`).

    A site is an attention, or another operation that a pass may replace.  Does nothing if deterministic algorithms are
    off or dash_inductor is switched off.  A second call for the same graph changes nothing.

    Args:
        graph: the graph.
        rewrites: the passes, in the order in which they are applied; those that `config` switches off are skipped.

    Returns:
        Whether the graph was changed.

    Raises:
        Exception: the exception of a pass, if `config.strict` is set.
        FallbackError: `config.strict` is set and a site was not replaced.  Sites that the program's settings keep do
            not count: those on the CPU with ``config.cpu="off"``, where PyTorch's kernels are deterministic, and
            forwards without a backward with ``config.forward="keep"``.
    """
    if not _looks_at_graphs():
        return False
    # Inductor's patterns put the backward of attention where the forward is, and it sorts the graph after all passes.
    stable_topological_sort(graph)
    before, nodes, shown = graph_text(graph), list(graph.nodes), Results(graph)
    results = list(isolated.apply(graph, rewrites))
    changed = nodes != list(graph.nodes)
    if changed:
        shown.restore()
    if results:
        trace_text("dash_graph_before", before)
    if changed:
        trace_text("dash_graph_after", graph_text(graph))
    _publish(graph, results)
    _refuse(results)
    return changed


def record_unseen(graphs: Sequence[Graph], cause: str, rewrites: Sequence[Rewrite]) -> bool:
    """Records every site of these graphs as not replaced, because Inductor's settings let no pass run.

    The graphs are not rewritten.  Does nothing if deterministic algorithms are off or dash_inductor is switched off.

    Args:
        graphs: the graphs.
        cause: the names of these settings, for the records.
        rewrites: the passes that would have run.

    Returns:
        Whether a pass would have replaced a site.  Sites that would not have been replaced are recorded with their own
        reason.

    Raises:
        Exception: the exception of a pass, if `config.strict` is set.
        FallbackError: `config.strict` is set and there is a site, except those that the program's own settings keep.
    """
    if not _looks_at_graphs():
        return False
    found: list[Result] = []
    for graph in graphs:
        results = list(isolated.leave(graph, cause, rewrites))
        _publish(graph, results)
        found += results
    _refuse(found)
    return any(result.record.reason is Reason.PASSES_OFF for result in found)


def _looks_at_graphs() -> bool:
    return torch.are_deterministic_algorithms_enabled() and _switch.is_enabled()


def _publish(graph: Graph, results: Sequence[Result]) -> None:
    if not results:
        return
    try:
        publish([result.record for result in results], "joint" if is_joint(graph) else "inference")
    except Exception as error:
        failures.caught("the publication of records", error)


def _refuse(results: Sequence[Result]) -> None:
    fallback = [result.record for result in results if result.record.status == "fallback" and not result.asked_for]
    if config.strict and fallback:
        what = "attention sites" if all(isinstance(record, SiteRecord) for record in fallback) else "sites"
        raise fallback_error(f"strict is set, and these {what} cannot be replaced:\n" + "\n".join(map(str, fallback)))
