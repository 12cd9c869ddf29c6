"""The outputs of ptxas for a Triton kernel: its report, and the machine code's loops around matrix instructions."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SPILLS = ("STL", "LDL")


@dataclass(frozen=True)
class Report:
    """ptxas -v: registers per thread, spilled bytes per thread, warnings that wgmma instructions were serialised."""

    registers: int
    spill_stores: int
    spill_loads: int
    serialised: tuple[str, ...]


def compile_with_report(compile: Callable[[], Any]) -> tuple[Any, Report]:
    """The result of `compile`, a Triton compilation, with the report of the assembler run."""
    from triton import knobs

    log = io.StringIO()
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        knobs.compilation.always_compile = True  # a kernel from the cache brings no report
        knobs.nvidia.dump_ptxas_log = True
        compiled = compile()
    text = log.getvalue()
    registers = re.search(r"Used (\d+) registers", text)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    assert registers, text
    assert spills, text
    return compiled, Report(int(registers[1]), int(spills[1]), int(spills[2]), serialisations(text))


def serialisations(log: str) -> tuple[str, ...]:
    """The lines in which ptxas says that it made asynchronous matrix instructions wait for each other (C75xx)."""
    return tuple(line for line in log.splitlines() if re.search(r"\bC75\d\d\b|wgmma.*serializ", line))


def disassemble(cubin: bytes) -> str:
    """SASS of a cubin, by the disassembler in the triton wheel."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        tool = Path(knobs.nvidia.nvdisasm.path).parent
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": str(tool)})
    return done.stdout


@dataclass
class Block:
    """Instructions without a jump into or out of their middle; `next` are the blocks that may follow."""

    lines: list[str]
    next: list[int]


def blocks(sass: str) -> dict[int, Block]:
    """The control-flow graph, by address of the first instruction.  Calls and indirect jumps are not followed."""
    lines = {int(a, 16): text.strip() for a, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", sass)}
    addresses = sorted(lines)
    jumps = {a: _target(lines[a]) for a in addresses}
    after = dict(itertools.pairwise(addresses))
    starts = {addresses[0], *(t for t in jumps.values() if t is not None)}
    starts |= {after[a] for a in addresses if a in after and (jumps[a] is not None or "EXIT" in lines[a])}
    graph: dict[int, Block] = {}
    for start in sorted(starts):
        block, address = Block([], []), start
        while True:
            text = lines[address]
            block.lines.append(text)
            target, following = jumps[address], after.get(address)
            if target is not None:
                block.next.append(target)
            ends = (target is not None and not _conditional(text)) or re.match(r"(EXIT|RET|BRX)", text)
            if following is not None and not ends and (target is not None or following in starts):
                block.next.append(following)
            if ends or target is not None or following is None or following in starts:
                break
            address = following
        graph[start] = block
    return graph


def _target(text: str) -> int | None:
    found = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
    return int(found[1], 16) if found else None


def _conditional(text: str) -> bool:
    return text.startswith("@") or re.search(r"\bBRA(\.\w+)* !?U?P\d", text) is not None


def _reach(graph: dict[int, Block], start: int, without: Iterable[int] = ()) -> set[int]:
    """Blocks that can run after `start`."""
    seen, todo = set(without), list(graph[start].next)
    found: set[int] = set()
    while todo:
        here = todo.pop()
        if here in seen or here not in graph:
            continue
        seen.add(here)
        found.add(here)
        todo += graph[here].next
    return found


@dataclass(frozen=True)
class MatmulLoops:
    """The innermost loops that hold matrix instructions, and what is in them.

    Spill instructions store to or load from local memory.

    Args:
        count: such loops.
        spills: spill instructions that every iteration runs, of all loops.
        spills_of_branches: those that an iteration may go past, such as the masking of edge tiles.
        barriers: where the warps of a role meet, in the loop that has most of them.
    """

    count: int
    spills: int
    spills_of_branches: int
    barriers: int


def _innermost_loops(graph: dict[int, Block], matmuls: list[int]) -> set[frozenset[int]]:
    """Strongly connected components that hold `matmuls`; if components are left in one without the jumps to where it is
    entered, these instead."""
    after = {start: _reach(graph, start) for start in graph}
    found: set[frozenset[int]] = set()
    for loop in {frozenset(b for b in after[m] if m in after[b]) for m in matmuls if m in after.get(m, ())}:
        heads = {n for start, block in graph.items() if start not in loop for n in block.next if n in loop}
        inside = {b: Block(graph[b].lines, [n for n in graph[b].next if n in loop and n not in heads]) for b in loop}
        found |= _innermost_loops(inside, [m for m in matmuls if m in loop]) if heads else set()
        if not any(inner <= loop for inner in found):
            found.add(loop)
    return found


def matmul_loops(sass: str) -> MatmulLoops:
    graph = blocks(sass)
    matmuls = [start for start, block in graph.items() if any("HGMMA" in line for line in block.lines)]
    loops = _innermost_loops(graph, matmuls)
    always = sometimes = barriers = 0
    for loop in loops:
        barriers = max(barriers, sum("BAR.SYNC" in line for start in loop for line in graph[start].lines))
        inside = {start: Block(graph[start].lines, [n for n in graph[start].next if n in loop]) for start in loop}
        for start in loop:
            count = sum(bool(re.match(rf"(@!?U?P\d+ )?({'|'.join(_SPILLS)})\b", line)) for line in inside[start].lines)
            if not count:
                continue
            others = [m for m in matmuls if m in loop and m != start]
            skippable = any(m in _reach(inside, m, [start]) for m in others)
            if skippable:
                sometimes += count
            else:
                always += count
    return MatmulLoops(len(loops), always, sometimes, barriers)
