"""What the assembler made of every Hopper kernel that the tests compile, for the Triton of this environment.

python -m tests.support.hopper_table > one.json        in an environment with one Triton
python -m tests.support.hopper_table one.json two.json the kernels that differ, as a table
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton

from ..kernels.hopper import test_bounded_budgets as bounded
from ..kernels.hopper.backward import test_budgets, test_data_budgets, test_dropout_budgets, test_varlen_budgets
from ..kernels.hopper.forward import test_budgets as test_forward_budgets
from . import hopper_builds, hopper_forward_builds

BACKWARDS = (
    *test_budgets.CASES, *test_data_budgets.SOON, *test_data_budgets.LATER, *test_dropout_budgets.CASES,
    *test_varlen_budgets.BACKWARDS,
)  # fmt: skip
FORWARDS = (*test_forward_budgets.CASES, *test_varlen_budgets.FORWARDS)


def kernels() -> Iterator[tuple[str, dict[str, int]]]:
    """(name, registers, spilled bytes, spill instructions in the steps' loops, bytes of shared memory) of each."""
    for case in BACKWARDS:
        used = hopper_builds.built(case)
        yield f"backward {case}", _facts(used, used.loops.spills)
    for forward in FORWARDS:
        found = hopper_forward_builds.built(forward)
        yield f"forward {forward}", _facts(found, sum(step.spills for step in found.steps))
    for kind, cases, built in (
        ("backward", (*bounded.SOON, *bounded.LATER), bounded.of_backward),
        ("forward", (*bounded.SOON, *bounded.LATER), bounded.of_forward),
    ):
        for softcapped in cases:
            near = built(softcapped)
            yield f"{kind} softcap {softcapped}", _facts(near, near.spills)


def _facts(used: Any, spills: int) -> dict[str, int]:
    report = used.report
    return {
        "registers": report.registers, "spilled": report.spill_stores + report.spill_loads, "in loops": spills,
        "shared": used.shared_memory,
    }  # fmt: skip


def differing(first: dict[str, Any], second: dict[str, Any]) -> Iterator[str]:
    """A line for each kernel whose facts differ between two tables."""
    for name, facts in first["kernels"].items():
        other = second["kernels"].get(name, {})
        if facts != other:
            yield f"{name}: " + ", ".join(
                f"{key} {value} -> {other.get(key)}" for key, value in facts.items() if value != other.get(key)
            )


def main(paths: list[str]) -> None:
    if paths:
        first, second = (json.loads(Path(path).read_text(encoding="utf-8")) for path in paths)
        print(*differing(first, second), sep="\n")
        return
    found = {}
    for name, facts in kernels():
        found[name] = facts
        print(name, facts, file=sys.stderr, flush=True)
    print(json.dumps({"triton": triton.__version__, "kernels": found}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
