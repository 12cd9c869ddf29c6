"""Publishes records to `graphs()`, `sites()` and `all_records()`, the log, PyTorch's counters and structured trace."""

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
from ..upstream.compilation import CompileContext, TracingContext, counters, trace_log, trace_structured
from . import records as _records
from .records import AnyRecord, GraphRecord, Record, SiteRecord

log = logging.getLogger("dash_inductor")
_UNEXPECTED = (Reason.COMPILE_FAILED, Reason.INTERNAL_ERROR)

_lock = threading.Lock()
_open: weakref.WeakKeyDictionary[TracingContext, GraphRecord] = weakref.WeakKeyDictionary()
"""The current record of each graph that is being compiled.  It grows with every nested graph (control flow,
`torch.compiler.nested_compile_region`), because passes see these one after another."""


def publish(records: Sequence[AnyRecord], kind: Literal["joint", "inference", ""], origin: str = "compiled") -> None:
    """Publishes the records of one graph; those of a nested graph are added to the record of the graph around it.

    `counters["dash_inductor"]` counts "replaced", "fallback" and "fallback_<reason>" for attention; the keys of other
    rewrites start with their name, as "embeddings_replaced".  The structured trace gets the JSON artifact "dash_sites".

    Args:
        records: the new records.
        kind: the kind of graph; "" if it is not known.
        origin: "compiled", or "eager" for a call outside of compiled graphs, which gets a graph record of its own.
    """
    context, compile_id = TracingContext.try_get() if origin == "compiled" else None, current_compile_id()
    sites = tuple(record for record in records if isinstance(record, SiteRecord))
    others = tuple(record for record in records if isinstance(record, Record))
    record = GraphRecord(compile_id, kind, origin, sites, others=others)
    with _lock:
        before = None if context is None else _open.get(context)
        if before is not None and before.compile_id == compile_id:
            record = before.joined(record)
            _records.replace_graph(before, record)
        else:
            _records.add(record)
        if context is not None:
            _open[context] = record
    _tell(record, records)


def finish() -> str:
    """Ends the record of the graph whose forward has just been compiled, and returns it as JSON; "" if it has none.

    Records published afterwards belong to another graph.
    """
    context = TracingContext.try_get()
    with _lock:
        record = None if context is None else _open.pop(context, None)
    return "" if record is None or record.compile_id != current_compile_id() else record.to_json()


def restore(text: str | None, origin: str) -> None:
    """Publishes the records of a graph that was loaded from a cache, as `publish` does.

    Args:
        text: the result of `finish` when the graph was compiled; None if the cache entry has no records.
        origin: the cache, "AOTAutogradCache" or "precompile".
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
    _tell(record, record.records)


def current_compile_id() -> str:
    """The id of the current compile, as tlparse shows it: "0/0", "0/0_1", "!1/0/0"; "" outside of a compile."""
    trace_id = CompileContext.current_trace_id()
    return "" if trace_id is None else str(trace_id)


def graph_text(graph: Graph) -> str:
    """Returns an FX graph as readable Python, for `trace_text`; "" if PyTorch's structured trace is off."""
    if not trace_log.handlers:
        return ""
    module = graph.owning_module
    if module is None:
        return str(graph)
    text: str = module.print_readable(print_output=False, include_stride=True, include_device=True)
    return text


def trace_text(name: str, text: str) -> None:
    """Adds a text artifact to PyTorch's structured trace, if that is on."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text)


def _tell(record: GraphRecord, new: Sequence[AnyRecord]) -> None:
    """Logs and counts the new records of a graph, and writes all of its records to the structured trace."""
    for one in new:
        log.log(logging.WARNING if one.reason in _UNEXPECTED else logging.INFO, "%s", one)
        prefix = "" if isinstance(one, SiteRecord) else f"{one.rewrite}_"
        counters["dash_inductor"][f"{prefix}{one.status}"] += 1
        if one.reason is not None:
            counters["dash_inductor"][f"{prefix}fallback_{one.reason.value}"] += 1
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "dash_sites", "encoding": "json"},
        payload_fn=lambda: json.dumps(record.as_dict(), indent=2),
    )
