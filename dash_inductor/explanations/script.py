"""Runs a user's script in this process, as ``python script.py`` would, and explains what it compiled."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import torch

from ..config import config
from ..errors import ArgumentError
from ..model.architectures import architecture
from ..records import records
from ..upstream import arch as machine
from .compiled_calls import CompiledCalls
from .elsewhere.why import left_on_the_cpu
from .explanation import Explanation

NOTHING = (
    "No attention with a backward was compiled under deterministic algorithms. Does the script call "
    "torch.use_deterministic_algorithms(True) and torch.compile, and does something need a gradient?"
)


def explain_script(path: str, arguments: Sequence[str], arch: str | None = None) -> tuple[Explanation, bool]:
    """Runs a script and explains the graphs that it compiled.  The script's stdout is redirected to stderr.

    Args:
        path: the script.
        arguments: the script's arguments.
        arch: also explain what would be compiled for a GPU of this architecture, see `explain`: each call that compiles
            something is traced once more.  None: explain the graphs as they were compiled.

    Returns:
        The explanation, and whether the script ended without an error; an error is printed.

    Raises:
        ArgumentError: the file does not exist, or the architecture is unknown.
    """
    if not Path(path).is_file():
        raise ArgumentError("script", path, "a file that exists")
    arch = None if arch is None else architecture(arch)
    known = {id(graph) for graph in records.graphs()}
    if arch in (None, "cpu") or arch == _arch_here():
        with redirect_stdout(sys.stderr), _arguments([path, *arguments]):
            error = _run(path)
        graphs = [graph for graph in records.graphs() if id(graph) not in known]
        unknown = "" if arch in (None, "cpu") else left_on_the_cpu(graphs)
    else:
        calls = CompiledCalls(arch, config.dump)
        with config.patch(dump=""), calls.watched(), redirect_stdout(sys.stderr), _arguments([path, *arguments]):
            error = _run(path)
        graphs, unknown = calls.graphs, calls.unknown
    notes = [] if error is None else [f"The script ended early: {error}."]
    if not unknown and not any(graph.sites or graph.missing for graph in graphs):
        notes.append(NOTHING)
    return Explanation.of(graphs, arch, notes, unknown), error is None


def _arch_here() -> str:
    return machine.arch_of(torch.device("cuda")) if torch.cuda.is_available() else "cpu"


def _run(path: str) -> str | None:
    """Runs the script; returns the error that ended it early, in words, or None."""
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        return None if end.code in (None, 0) else f"exit status {end.code}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        traceback.print_exc()
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return None


@contextmanager
def _arguments(argv: list[str]) -> Iterator[None]:
    """Sets `sys.argv` and the first folder of `sys.path` for a script inside the block."""
    before = sys.argv, sys.path[:]
    sys.argv, sys.path = argv, [str(Path(argv[0]).resolve().parent), *sys.path]
    try:
        yield
    finally:
        sys.argv, sys.path = before
