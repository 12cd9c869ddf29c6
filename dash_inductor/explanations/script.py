"""Runs a user's script in this process, as ``python script.py`` would, and explains what it compiled."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ..config import config
from ..errors import ArgumentError
from ..model.architectures import architecture
from ..observers.scripts import INTERRUPTED, Stopped, run_script
from ..records import records
from ..upstream import arch as machine
from .compiled_calls import CompiledCalls
from .elsewhere.why import left_on_the_cpu
from .explanation import Explanation

NOTHING = (
    "No attention with a backward was compiled under deterministic algorithms. Does the script call "
    "torch.use_deterministic_algorithms(True) and torch.compile, and does something need a gradient?"
)


def explain_script(
    path: str, arguments: Sequence[str], arch: str | None = None, stop_after: int = 0
) -> tuple[Explanation, bool]:
    """Runs a script and explains the graphs that it compiled.  The script's stdout is redirected to stderr.

    Args:
        path: the script.
        arguments: the script's arguments.
        arch: also explain what would be compiled for a GPU of this architecture, see `explain`: each call that compiles
            something is traced once more.  None: explain the graphs as they were compiled.
        stop_after: the number of training steps after which the script is ended; 0 to run it to its end.

    Returns:
        The explanation, and whether the script ended without an error and was not interrupted; an error is printed.

    Raises:
        ArgumentError: the file does not exist, or the architecture is unknown.
    """
    if not Path(path).is_file():
        raise ArgumentError("script", path, "a file that exists")
    arch = None if arch is None else architecture(arch)
    known = {id(graph) for graph in records.graphs()}
    if arch in (None, "cpu") or arch == _arch_here():
        end = _run(path, arguments, stop_after)
        graphs = [graph for graph in records.graphs() if id(graph) not in known]
        unknown = "" if arch in (None, "cpu") else left_on_the_cpu(graphs)
    else:
        calls = CompiledCalls(arch, config.dump)
        with config.patch(dump=""), calls.watched():
            end = _run(path, arguments, stop_after)
        graphs, unknown = calls.graphs, calls.unknown
    notes = [f"The script {end.note}."] if end.note else []
    if not unknown and not any(graph.sites or graph.missing for graph in graphs):
        notes.append(NOTHING)
    return Explanation.of(graphs, arch, notes, unknown), end.well


def _arch_here() -> str:
    return machine.arch_of(torch.device("cuda")) if torch.cuda.is_available() else "cpu"


class _End(NamedTuple):
    """How a script ended: whether as it should, and what is to be said about it ("" for nothing)."""

    well: bool
    note: str


def _run(path: str, arguments: Sequence[str], stop_after: int) -> _End:
    try:
        run_script(path, arguments, stop_after)
    except Stopped as stopped:
        return _End(True, f"was {stopped}")
    except KeyboardInterrupt:
        return _End(False, f"was {INTERRUPTED}")
    except SystemExit as end:
        return _End(True, "") if end.code in (None, 0) else _End(False, f"ended early: exit status {end.code}")
    except BaseException as error:
        traceback.print_exc()
        words = " ".join(str(error).split())[:300]
        return _End(False, f"ended early: {type(error).__name__}: {words}")
    return _End(True, "")
