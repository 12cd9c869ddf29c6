"""Names the rank of a training run that computes wrongly, hangs, has died or lags, and records runs to compare them.

    guard(folder)            which rank computes wrongly, hangs, has died or lags, while the run goes on
    record(folder)           128-bit fingerprints of a run: gradients, parameters, optimizer state, activations
    compare(a, b)            the first step, rank and tensor in which two recordings differ
    compare_layouts(a, b)    whether runs of different layouts differ by more than rounding

``dash-guard watch -- torchrun train.py`` and ``DASH_GUARD=folder`` do so for a program that is not changed;
``dash-guard record`` and ``DASH_GUARD_RECORD=folder`` record one; ``dash-guard compare`` and ``verify`` compare two.

In the process of every rank, `process.rank.Rank` gets the events of training and shows them to its checks
(`checks.check.Check`).  A check computes what is to be compared and sends it (`transport.messages.Message`,
`transport.channel.Channel`) to one monitor (`monitor.monitor.Monitor`), whose detectors (`detectors.detector.Detector`)
find out what it means (`report.findings.Finding`).  Detectors are pure: they know messages and the time, and touch no
process, clock or network.  Nothing runs in a collective of the training or changes a bit of it; what a check could not
see goes into `report.coverage.Coverage`.

Importing this package does what `import torch` does by itself where torch loads extensions
(TORCH_DEVICE_BACKEND_AUTOLOAD is not 0): it starts what the variables ask for.

This file does not import torch, because it may run while torch itself is being imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import _dash_guard_autoload

from dash_inductor.observers import active

if TYPE_CHECKING:
    from .process.guard import guard
    from .recorder.recorder import record
    from .recordings.compare import Comparison, compare
    from .recordings.layouts import LayoutComparison, compare_layouts

__all__ = ["Comparison", "LayoutComparison", "compare", "compare_layouts", "guard", "record"]

_HOMES = {
    "Comparison": ".recordings.compare",
    "LayoutComparison": ".recordings.layouts",
    "compare": ".recordings.compare",
    "compare_layouts": ".recordings.layouts",
    "guard": ".process.guard",
    "record": ".recorder.recorder",
}
"""The modules of the names that are imported when they are first asked for, because most of them import torch."""


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _show(graph: Any) -> bool:
    from .recorder.in_graphs import insert

    return insert(graph)


active.graphs = active.Graphs(__name__, _show)
_dash_guard_autoload.autoload()
