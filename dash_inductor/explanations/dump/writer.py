"""Writes the dump of everything that this process compiles; the package's docstring lists the files."""

from __future__ import annotations

import difflib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...config import config
from ...records import records
from ...records.publication import current_compile_id
from ...records.records import GraphRecord
from . import files, graph_page, run_page
from .snapshot import Snapshot

log = logging.getLogger("dash_inductor")
_lock = threading.RLock()  # graphs may be compiled on several threads
_arch: ContextVar[str | None] = ContextVar("dash_inductor_dump_arch", default=None)


@dataclass
class _Run:
    """The folder of this process, and its graphs; `newest` has the latest graph of each compile id."""

    folder: Path
    pages: list[graph_page.GraphPage] = field(default_factory=list)
    newest: dict[str, graph_page.GraphPage] = field(default_factory=dict)


@contextmanager
def dumping(folder: str, arch: str | None = None) -> Iterator[None]:
    """A context manager that dumps what is compiled inside its block.

    Args:
        folder: the folder to write to, as `config.dump`.
        arch: explain sites, and compile their kernels, for this architecture instead of that of the tensors' device.
    """
    token = _arch.set(arch)
    try:
        with config.patch(dump=folder):
            yield
    finally:
        _arch.reset(token)


@contextmanager
def joint_graph(graph: torch.fx.Graph) -> Iterator[None]:
    """A context manager that dumps a joint or inference graph before and after the pass that runs in its block.

    The dump is also written if the pass raises.
    """
    before = _safely(lambda: (_readable(graph), Snapshot.of(graph), records.graphs_here()))
    try:
        yield
    finally:
        if before is not None:
            _safely(lambda: _write_graph(graph, *before))


def generated_code(compiled: Any, kind: str) -> None:
    """Adds Inductor's code (attribute `source_code` of `compiled`) to the page of the graph that is being compiled.

    Args:
        compiled: the compiled graph.
        kind: "forward", "backward" or "inference".
    """

    def write() -> None:
        page = _run().newest.get(current_compile_id())
        code = getattr(compiled, "source_code", None)
        if page is not None and code:
            page.add_code(kind, code)

    _safely(write)


def index() -> Path | None:
    """The path of the HTML page in `config.dump` that lists this process's graphs; None if no graph was dumped."""
    run = _runs.get((config.dump, os.getpid()))
    return run.folder / "index.html" if run is not None and run.pages else None


def _write_graph(graph: torch.fx.Graph, text: str, before: Snapshot, known: tuple[GraphRecord, ...]) -> None:
    run, number = _run(), current_compile_id()
    record = _published(number, known, records.graphs_here())
    after = _readable(graph)
    changed = "".join(
        difflib.unified_diff(text.splitlines(True), after.splitlines(True), "joint_before.py", "joint_after.py")
    )
    page = graph_page.GraphPage(
        folder=files.new_folder(run.folder, number or "graph"),
        record=record,
        arch=_arch.get(),
        texts={"joint_before.py": text, "joint_after.py": after, "joint.diff": changed},
        before=before,
        after=Snapshot.of(graph),
    )
    page.write()
    run.pages.append(page)
    run.newest[number] = page
    files.write(run.folder / "index.html", run_page.graphs(run.folder.name, run.pages))
    files.write(run.folder.parent / "index.html", run_page.runs(run.folder.parent))


def _published(number: str, before: Sequence[GraphRecord], after: Sequence[GraphRecord]) -> GraphRecord:
    """The record of one graph, from all graph records before and after the pass over it.

    The record of a graph with nested ones grows with each of these, so that the difference is needed.
    """
    old, new = (
        [x for x in these if not any(x is y for y in others)] for these, others in ((before, after), (after, before))
    )
    sites = tuple(site for record in new for site in record.sites)[sum(len(record.sites) for record in old) :]
    others = tuple(other for record in new for other in record.others)[sum(len(record.others) for record in old) :]
    return GraphRecord(number, new[-1].kind if new else "", "compiled", sites, others=others)


def _readable(graph: torch.fx.Graph) -> str:
    module = graph.owning_module
    if isinstance(module, torch.fx.GraphModule):
        text: str = module.print_readable(print_output=False, include_stride=True, include_device=True)
        return text + "\n"
    return f"{graph}\n"


_runs: dict[tuple[str, int], _Run] = {}
"""The runs by folder and process id; a forked process gets its own."""


def _run() -> _Run:
    key = folder, process = config.dump, os.getpid()
    if key not in _runs:
        rank = f"rank{os.environ['RANK']}_" if "RANK" in os.environ else ""
        name = f"{rank}{time.strftime('%Y%m%d-%H%M%S')}_process{process}"
        _runs[key] = _Run(files.new_folder(Path(folder), name))
    return _runs[key]


def _safely(action: Callable[[], Any]) -> Any:
    """Runs an action and returns its result; None, after one warning per process, if it raises.

    A dump must never break a compile.
    """
    try:
        with _lock:
            return action()
    except Exception as error:
        _warn_once(os.getpid(), config.dump, error)
        return None


_warned: set[tuple[int, str]] = set()


def _warn_once(process: int, folder: str, error: Exception) -> None:
    level = logging.DEBUG if (process, folder) in _warned else logging.WARNING
    _warned.add((process, folder))
    log.log(level, "the dump to %s is incomplete: %s: %s", folder, type(error).__name__, error)
    log.debug("the dump to %s", folder, exc_info=error)
