"""The kernels that build tables from a mask's vectors: in Triton's interpreter, compiled, and their host side."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dash_inductor.kernels import mask_tables, standalone, tables
from dash_inductor.kernels.hopper.compiling import compile_kernel
from dash_inductor.kernels.mask_tables import backward_tables, forward_tables
from dash_inductor.kernels.mask_vectors import Vectors
from triton.compiler import ASTSource

from dash_inductor.errors import ArgumentError
from dash_inductor.model.mask import Band

COUNTS = {
    "pairs": 24,
    "halves": 8,
    "ids": 40,
    "small": 8,
    "folded": 2,
    "wide": 2,
    "rows": 6,
    "alone": 2,
    "extreme": 3,
    "altered": 1,
}


@pytest.fixture(scope="module")
def results() -> list[str]:
    """What Triton's interpreter, in a process of its own, says of every kind of masks."""
    words = [str(word) for pair in COUNTS.items() for word in pair]
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.interpreted_tables", *words],
        cwd=Path(__file__).parent.parent, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()


@pytest.mark.parametrize("kind", COUNTS)
def test_word_by_word_against_the_definition(kind: str, results: list[str]) -> None:
    """Random masks, tile shapes, heads, sections, strides and dtypes; see `support.interpreted_tables`."""
    assert f"RESULT {kind} compared {COUNTS[kind]}" in results


# kernel, constants, types of the arguments that are not int32, warps
STRIDES = dict.fromkeys(("valid_b", "valid_j", "q_ids_b", "q_ids_i", "kv_ids_b", "kv_ids_j"), "i64")
Kernel = tuple[Any, dict[str, int], dict[str, str], int]


def classify(ids: str, block_q: int, block_kv: int) -> Kernel:
    constants = {"HAS_LO": 1, "HAS_HI": 1, "HAS_KEYS": 1, "HAS_SEGMENTS": 1, "BLOCK_Q": block_q, "BLOCK_KV": block_kv}
    types = {"KINDS": "*i8", "VALID": "*i1", "Q_IDS": ids, "KV_IDS": ids, **STRIDES}
    return tables.classify, {**constants, "Q_TILES": mask_tables.Q_TILES}, types, mask_tables.CLASSIFY_WARPS


def pointers(small: str, medium: str, large: str, words: str) -> dict[str, str]:
    """Types of the arguments with these names, joined by blanks: int8, int16, int64 and int32."""
    named = {"*i8": small, "*i16": medium, "*i64": large, "*i32": words}
    return {name: kind for kind, names in named.items() for name in names.split()}


KERNELS: dict[str, Kernel] = {
    "classify": classify("*i64", 64, 128),
    "classify, large tiles": classify("*i64", 128, 128),
    "classify, int32": classify("*i32", 64, 128),
    "arrange": (
        tables.arrange, {"ROWS": mask_tables.ROWS, "COLUMNS": mask_tables.COLUMNS},
        pointers("KINDS", "RANKS", "KEYS", "BASE VISITS CONTRIBUTIONS PLACES ORDER LONGEST"), mask_tables.ARRANGE_WARPS,
    ),
    "write": (
        tables.write, {"COLUMNS": mask_tables.COLUMNS, "HEADS": mask_tables.HEADS},
        pointers("KINDS", "RANKS", "KEYS", "BASE VISITS PLACES STEPS TICKETS"), mask_tables.WRITE_WARPS,
    ),
    "write_rows": (
        tables.write_rows, {"ROWS": mask_tables.ROWS, "COLUMNS": mask_tables.Q_TILES},
        pointers("KINDS", "", "", "VISITS STEPS"), mask_tables.WRITE_WARPS,
    ),
    "order_rows": (
        tables.order_rows, {"COLUMNS": mask_tables.Q_TILES}, pointers("", "", "", "VISITS ORDER"),
        mask_tables.WRITE_WARPS,
    ),
}  # fmt: skip


@functools.cache
def compiled(name: str) -> tuple[dict[str, str], standalone.Resources]:
    """(TTGIR and PTX, resources) for sm_90."""
    function, constants, types, warps = KERNELS[name]
    built = compile_kernel(function, ASTSource, constants, types, {}, {"num_warps": warps, "num_stages": 1})
    return {"ttgir": built.asm["ttgir"], "ptx": built.asm["ptx"]}, standalone.resources(built, "sm_90")


@pytest.mark.parametrize("name", KERNELS)
def test_fits_the_architecture(name: str) -> None:
    """Any Triton: no spills to speak of, little shared memory, nothing accumulated in memory."""
    asm, used = compiled(name)
    assert max(used.spill_stores, used.spill_loads) <= 64, used
    assert used.shared_memory <= 48 << 10, used
    assert not re.search(r"\b(red|atom)\.", asm["ptx"])


def test_phases_are_separated_by_barriers() -> None:
    """What a thread of `arrange` reads, another one may have written: past a barrier of the CTA, and not through a
    cache that is not coherent.

    Five phases, each of which loads first and then stores, at the end of its loops.
    """
    asm, _ = compiled("arrange")
    assert "ld.global.nc" not in asm["ptx"]
    accesses = re.findall(r"tt\.(load|store) |(?:ttg|gpu)\.(barrier)", asm["ttgir"])
    phases = " ".join(map("".join, accesses)).split(" barrier ")
    assert len(phases) == 5
    assert all(re.fullmatch(r"(load )+store( store)?", phase) for phase in phases), phases


# ------------------------------------------------------------------------------------------------------- the host side

VALID = torch.ones(2, 40, dtype=torch.bool)
IDS = torch.zeros(2, 30, dtype=torch.int64), torch.zeros(2, 40, dtype=torch.int32)


def mask(valid: torch.Tensor | None = VALID, segments: tuple[torch.Tensor, torch.Tensor] | None = None) -> Vectors:
    return Vectors(Band(), 30, 40, valid, segments)


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: mask(None), "valid, segments=(None, None)"),
    (lambda: mask(VALID[:, :39]), "valid.shape=(2, 39) is not allowed: expected [batch >= 1, 40]"),
    (lambda: mask(VALID[0]), "valid.shape=(40,)"),
    (lambda: mask(VALID[:0]), "valid.shape=(0, 40)"),
    (lambda: mask(VALID.float()), "valid.dtype=torch.float32"),
    (lambda: mask(VALID, (IDS[0], IDS[1][:1])), "segments[1].shape=(1, 40)"),
    (lambda: mask(None, (IDS[1], IDS[0])), "segments[0].shape=(2, 40) is not allowed: expected [batch >= 1, 30]"),
    (lambda: mask(None, (IDS[0], IDS[1].bool())), "segments[1].dtype=torch.bool"),
    (lambda: mask(VALID.to("meta"), IDS), "segments[0].device='cpu' is not allowed: expected meta"),
    (lambda: backward_tables(mask(), 48, 64, 1, 1), "block_q=48 is not allowed: expected a power of two"),
    (lambda: forward_tables(mask(), 64, 0), "block_kv=0"),
    (lambda: backward_tables(mask(), 64, 128, 0, 1), "heads=0"),
    (lambda: backward_tables(mask(), 64, 128, 1, 0), "section=0"),
    (
        lambda: backward_tables(mask(), 16, 16, 1 << 27, 1),
        "batch * heads * kv tiles=805306368 is not allowed: expected less than 2**29",
    ),
    (
        lambda: backward_tables(Vectors(Band(), 1 << 16, 40, VALID), 1, 1, 1, 1),
        "q tiles=65536 is not allowed: expected at most 32768",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        call()
