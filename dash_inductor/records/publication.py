"""Publishing records: `graphs()` and `sites()`, a log line each, counters, and artifacts in the structured trace."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import weakref
from collections.abc import Sequence
from typing import Literal

from torch.fx import Graph

from ..model.reasons import Reason
from ..upstream.compilation import CompileContext, TracingContext, counters, trace_structured
from . import records as _records
from .records import GraphRecord, SiteRecord

log = logging.getLogger("dash_inductor")
_UNEXPECTED = (Reason.COMPILE_FAILED, Reason.INTERNAL_ERROR)

_lock = threading.Lock()
_open: weakref.WeakKeyDictionary[TracingContext, GraphRecord] = weakref.WeakKeyDictionary()
"""The record so far of every graph that is being compiled: graphs nested in it, as by control flow and by
`torch.compiler.nested_compile_region`, are read one after another."""


def publish(sites: Sequence[SiteRecord], kind: Literal["joint", "inference"]) -> None:
    """Make the records of one graph visible everywhere, or of one that is nested in the graph being compiled.

    `counters["dash_inductor"]` counts "replaced", "kept" and "kept_<reason>"; the artifact "dash_sites" is JSON.
    """
    context, compile_id = TracingContext.try_get(), current_compile_id()
    record = GraphRecord(compile_id, kind, "compiled", tuple(sites))
    with _lock:
        before = None if context is None else _open.get(context)
        if before is not None and before.compile_id == compile_id:
            record = dataclasses.replace(record, sites=(*before.sites, *record.sites))
            _records.replace_graph(before, record)
        else:
            _records.add(record)
        if context is not None:
            _open[context] = record
    _tell(record, sites)


def finish() -> str:
    """The record of the graph whose forward has just been compiled, as text; "" if it has no attention.

    Records published afterwards belong to another graph.
    """
    context = TracingContext.try_get()
    with _lock:
        record = None if context is None else _open.pop(context, None)
    return "" if record is None or record.compile_id != current_compile_id() else record.to_json()


def restore(text: str | None, origin: str) -> None:
    """Make the records of a graph that is from a cache visible, as `publish` does.

    Args:
        text: what `finish` gave when the graph was compiled; None where the cache's entry has nothing.
        origin: the cache.
    """
    record = None
    if text is not None:
        try:
            record = GraphRecord.from_json(text)
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            log.warning("the records of a cached graph cannot be read: %s: %s", type(error).__name__, error)
    if record is None:
        record = GraphRecord(current_compile_id(), "", origin, (), missing=True)
    else:
        compile_id = current_compile_id() or record.compile_id
        record = dataclasses.replace(record, compile_id=compile_id, origin=origin)
    _records.add(record)
    log.info("%s", record)
    _tell(record, record.sites)


def current_compile_id() -> str:
    """The compile that is going on, as tlparse names it: "0/0", "0/0_1", "!1/0/0"; "" outside of one."""
    trace_id = CompileContext.current_trace_id()
    return "" if trace_id is None else str(trace_id)


def trace_graph(name: str, graph: Graph) -> None:
    """Put a graph into PyTorch's structured trace, as readable Python; nothing happens where nobody traces."""
    module = graph.owning_module
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: (
            str(graph)
            if module is None
            else module.print_readable(print_output=False, include_stride=True, include_device=True)
        ),
    )


def _tell(record: GraphRecord, sites: Sequence[SiteRecord]) -> None:
    """Log and count `sites`, the new ones of a record, and trace the record."""
    for site in sites:
        log.log(logging.WARNING if site.reason in _UNEXPECTED else logging.INFO, "%s", site)
        counters["dash_inductor"][site.status] += 1
        if site.reason is not None:
            counters["dash_inductor"][f"kept_{site.reason.value}"] += 1
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "dash_sites", "encoding": "json"},
        payload_fn=lambda: json.dumps(record.as_dict(), indent=2),
    )
