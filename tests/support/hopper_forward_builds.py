"""Main kernels of the Hopper forward compiled without a GPU, and what the assembler made of them."""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from dash_inductor.kernels.hopper.forward import build
from dash_inductor.model import Band

from . import sass
from .calls import traits_of


@dataclass(frozen=True)
class Case:
    """Head dims of q and k and of v, mask, dtype, no ragged kv tile; what else there is of data, dropout, rows."""

    dims: tuple[int, int]
    mask: Band
    dtype: Any = "bfloat16"
    even_kv: bool = True
    segment_ids: bool = False
    dense: bool = False
    dropout: bool = False
    varlen: bool = False
    short: bool = False

    @property
    def data(self) -> bool:
        return self.segment_ids or self.dense

    def __str__(self) -> str:
        others = {
            "ragged": not self.even_kv,
            "segments": self.segment_ids,
            "dense": self.dense,
            "dropout": self.dropout,
        }
        others |= {"varlen": self.varlen, "short": self.short}
        words = f"{self.dims[0]}/{self.dims[1]}", str(self.mask), self.dtype, *(name for name in others if others[name])
        return " ".join(words)

    def problem(self) -> build.Specialisation:
        traits = traits_of(self.mask, self.segment_ids, self.dense, self.dropout, self.varlen)
        return build.Specialisation(self.dtype, *self.dims, traits, self.even_kv, self.short)


@dataclass(frozen=True)
class Step:
    """The machine code of one loop over kv tiles: instructions, and how many of each operation."""

    instructions: int
    operations: Counter[str]

    @property
    def spills(self) -> int:
        return self.operations["STL"] + self.operations["LDL"]


@dataclass(frozen=True)
class Built:
    """A compiled main kernel: PTX, bytes of shared memory, ptxas's report, and the loops over kv tiles."""

    ptx: str
    shared_memory: int
    report: sass.Report
    steps: tuple[Step, ...]
    starts_early: bool

    def __str__(self) -> str:
        r = self.report
        lengths = [step.instructions for step in self.steps]
        text = f"registers {r.registers}, spilled {r.spill_stores}/{r.spill_loads}, shared {self.shared_memory}"
        return f"{text}, steps {min(lengths)}..{max(lengths)}"


@functools.cache
def built(case: Case) -> Built:
    kernel, report = sass.compile_with_report(lambda: build.Kernels(case.problem()).main)
    found = steps(sass.disassemble(kernel.asm["cubin"]))
    return Built(kernel.asm["ptx"], kernel.metadata.shared, report, found, kernel.metadata.launch_pdl)


def steps(text: str) -> tuple[Step, ...]:
    """The innermost loops with matrix instructions inside the loop over tiles.

    Every tile takes the logarithm of its sums: without those blocks, what is left of the loops over tiles are the loops
    inside them.  Without the blocks at which a loop is entered, what is left of it are the loops inside it.
    """
    graph = sass.blocks(text)
    per_tile = [start for start, block in graph.items() if any("MUFU.LG2" in line for line in block.lines)]
    assert per_tile
    inner = {start: block for start, block in graph.items() if start not in per_tile}
    found = []
    for loop in sorted(_innermost(inner, set(inner)), key=min):
        lines = [line for start in loop for line in inner[start].lines]
        found.append(Step(len(lines), Counter(map(_operation, lines))))
    return tuple(found)


def _innermost(graph: dict[int, sass.Block], within: set[int]) -> set[frozenset[int]]:
    """The loops among some blocks that have matrix instructions, and no such loop inside."""
    part = {start: graph[start] for start in within}
    after = {start: sass._reach(part, start) for start in part}
    loops = {
        frozenset(b for b in after[start] if start in after[b])
        for start, block in part.items()
        if start in after[start] and any("HGMMA" in line for line in block.lines)
    }
    found: set[frozenset[int]] = set()
    for loop in loops:
        entries = {b for start in set(graph) - loop for b in graph[start].next if b in loop}
        found |= _innermost(graph, set(loop - entries)) or {loop}
    return found


def _operation(line: str) -> str:
    return re.split(r"[. ]", re.sub(r"^@!?U?P\d+ ", "", line))[0]
