"""The Hopper kernel under compute-sanitizer: memory errors, reads of unwritten memory, races in shared memory."""

from __future__ import annotations

import re

from ..support import sanitizer
from ..support.hopper import MARKS
from ..support.sanitizer import races, report

pytestmark = [*MARKS, sanitizer.needed]

PROGRAM = "hopper_sanitized"


def unwritten_reads(lines: list[str]) -> tuple[int, int]:
    """Reads that initcheck reports: (of memory that TMA writes, of other memory).  It does not see TMA's writes."""
    ranges = [[int(x, 16) for x in line.split()[1:]] for line in lines if line.startswith("tma ")]
    assert len(ranges) == 18
    addresses = [int(m[1], 16) for line in lines if (m := re.search(r"Address (0x[0-9a-f]+)", line))]
    known = sum(any(first <= address < end for first, end in ranges) for address in addresses)
    return known, len(addresses) - known


def test_memcheck() -> None:
    assert "========= ERROR SUMMARY: 0 errors" in report("memcheck", PROGRAM)


def test_initcheck() -> None:
    assert unwritten_reads(report("initcheck", PROGRAM))[1] == 0


def test_initcheck_sees_other_memory() -> None:
    """The test above can fail: one read of memory that nobody wrote is reported as such."""
    assert unwritten_reads(report("initcheck", PROGRAM, "--control"))[1] > 0


def test_racecheck() -> None:
    """Only Triton's own dispatch of the roles is reported, and words that consumers read when TMA has completed a
    barrier, which racecheck does not follow: see docs/what-we-know.md."""
    assert races(report("racecheck", PROGRAM)) <= {
        frozenset({"entry.py hopper_backward"}),
        frozenset({"packed_tiles.py put_int32", "packed_tiles.py read_int32"}),
    }
