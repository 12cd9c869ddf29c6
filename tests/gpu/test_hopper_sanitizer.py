"""The Hopper kernel under compute-sanitizer: memory errors, reads of unwritten memory, races in shared memory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

from ..support.distribution import ROOT
from ..support.hopper import MARKS
from ..support.racecheck import races

_sanitizer = shutil.which("compute-sanitizer")
pytestmark = [*MARKS, pytest.mark.skipif(_sanitizer is None, reason="compute-sanitizer is not in PATH")]


def report(tool: str, *arguments: str) -> list[str]:
    """Lines of the program's output and the tool's report."""
    command = [str(_sanitizer), "--tool", tool, "--print-limit", "1000000", "--show-backtrace", "no"]
    command += ["--report-api-errors", "no"] * (tool == "memcheck")  # Triton 3.9 asks for what older drivers refuse
    command += [sys.executable, "-m", "tests.support.hopper_sanitized", *arguments]
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # every tensor is an allocation that the tool knows
    root = ROOT
    run = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=300)
    lines = run.stdout.splitlines()
    assert "done" in lines, run.stdout[-2000:] + run.stderr[-2000:]
    return lines


def unwritten_reads(lines: list[str]) -> tuple[int, int]:
    """Reads that initcheck reports: (of memory that TMA writes, of other memory).  It does not see TMA's writes."""
    ranges = [[int(x, 16) for x in line.split()[1:]] for line in lines if line.startswith("tma ")]
    assert len(ranges) == 18
    addresses = [int(m[1], 16) for line in lines if (m := re.search(r"Address (0x[0-9a-f]+)", line))]
    known = sum(any(first <= address < end for first, end in ranges) for address in addresses)
    return known, len(addresses) - known


def test_memcheck() -> None:
    assert "========= ERROR SUMMARY: 0 errors" in report("memcheck")


def test_initcheck() -> None:
    assert unwritten_reads(report("initcheck"))[1] == 0


def test_initcheck_sees_other_memory() -> None:
    """The test above can fail: one read of memory that nobody wrote is reported as such."""
    assert unwritten_reads(report("initcheck", "--control"))[1] > 0


def test_racecheck() -> None:
    """Only Triton's own dispatch of the roles is reported, and words that consumers read when TMA has completed a
    barrier, which racecheck does not follow: see docs/what-we-know.md."""
    assert races(report("racecheck")) <= {
        frozenset({"entry.py hopper_backward"}),
        frozenset({"packed_tiles.py put_int32", "packed_tiles.py read_int32"}),
    }
