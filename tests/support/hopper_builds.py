"""Main kernels of the Hopper backward compiled without a GPU, and what the assembler made of them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from dash_inductor.kernels.hopper.backward import build
from dash_inductor.model import Band, Tiles

from . import sass
from .calls import traits_of

TILES = {
    (64, 64): Tiles(128, 128, 8, 2),
    (96, 96): Tiles(64, 128, 8, 2),
    (128, 128): Tiles(64, 128, 8, 2),
    (192, 128): Tiles(64, 128, 8, 2),
    (192, 192): Tiles(64, 64, 8, 1),
    (256, 256): Tiles(64, 64, 8, 1),
}
"""By head dims of q, k and of v."""


@dataclass(frozen=True)
class Case:
    """A variant: head dims of q, k and of v, band, schedule, dtype, query heads per kv head, no ragged kv tile, and
    which data the mask has, dropout, a mask of rows, stamps."""

    dims: tuple[int, int]
    mask: Band
    schedule: str
    dtype: Any = "bfloat16"
    group: int = 1
    even_kv: bool = True
    segment_ids: bool = False
    dense: bool = False
    dropout: bool = False
    varlen: bool = False
    stamped: bool = False

    def __str__(self) -> str:
        ragged = "" if self.even_kv else " ragged"
        data = (
            " segments" * self.segment_ids + " dense" * self.dense + " dropout" * self.dropout + " varlen" * self.varlen
        )
        data += " stamped" * self.stamped
        return (
            f"{self.dims[0]}/{self.dims[1]} {self.mask} {self.schedule} {self.dtype} group {self.group}{ragged}{data}"
        )

    @property
    def step_texts(self) -> int:
        """How often a step stands in the code: two times if steps that the mask cuts have code of their own."""
        cuts = not self.mask.is_full or not self.even_kv
        return 1 + (cuts and self.dims == (64, 64) and not (self.segment_ids or self.dense or self.dropout))

    @property
    def barriers(self) -> int:
        """How often all consumers meet in a step: before and after they store dS, and before that P, if they do."""
        return 3 if self.dims == (256, 256) else 2

    def specialisation(self) -> build.Specialisation:
        traits = traits_of(self.mask, self.segment_ids, self.dense, self.dropout, self.varlen)
        even = self.even_kv and not traits.components
        return build.Specialisation(
            self.dtype, *self.dims, self.group, self.schedule, traits, even, TILES[self.dims], self.stamped
        )


@dataclass(frozen=True)
class Built:
    """A compiled main kernel: PTX, bytes of shared memory, ptxas's report, the loops around its matrix instructions,
    and whether its CTAs may start before the kernel before it has ended.

    As text: spilled bytes stored/loaded; spill instructions in loops that every step runs + that some steps run.
    """

    ptx: str
    shared_memory: int
    report: sass.Report
    loops: sass.MatmulLoops
    starts_early: bool

    def __str__(self) -> str:
        r, loops = self.report, self.loops
        text = f"registers {r.registers}, spilled {r.spill_stores}/{r.spill_loads}, shared {self.shared_memory}"
        return f"{text}, in loops {loops.spills}+{loops.spills_of_branches}"


@functools.cache
def built(case: Case) -> Built:
    kernel, report = sass.compile_with_report(lambda: build.Kernels(case.specialisation()).main)
    loops = sass.matmul_loops(sass.disassemble(kernel.asm["cubin"]))
    return Built(kernel.asm["ptx"], kernel.metadata.shared, report, loops, kernel.metadata.launch_pdl)
