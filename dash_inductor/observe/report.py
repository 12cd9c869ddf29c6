"""Publishing records: `sites()`, a log line each, counters, and an artifact in PyTorch's structured trace."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from torch._dynamo.utils import counters
from torch._logging._internal import trace_structured

from ..model.reasons import Reason
from . import records as _records
from .records import GraphRecord, SiteRecord

log = logging.getLogger("dash_inductor")
_UNEXPECTED = (Reason.COMPILE_FAILED, Reason.INTERNAL_ERROR)


def publish(records: Sequence[SiteRecord]) -> None:
    """Make the records of one graph visible everywhere.

    `counters["dash_inductor"]` counts "replaced", "kept" and "kept_<reason>"; the artifact "dash_sites" is JSON.
    """
    _records.add(GraphRecord("", "joint", "compiled", tuple(records)))
    for record in records:
        level = logging.WARNING if record.reason in _UNEXPECTED else logging.INFO
        log.log(level, "%s", record)
        counters["dash_inductor"][record.status] += 1
        if record.reason is not None:
            counters["dash_inductor"][f"kept_{record.reason.value}"] += 1
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "dash_sites", "encoding": "json"},
        payload_fn=lambda: json.dumps([record.as_dict() for record in records], indent=2),
    )
