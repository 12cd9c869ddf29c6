"""Digests of the PTX of the Hopper kernel's variants: a change of its sources shows which of them it touches.

``python -m tests.support.kernel_code > tests/golden/hopper_code.json`` writes them down, with the Triton that `PINNED`
names.
"""

from __future__ import annotations

import functools
import hashlib
import json

from .distribution import ROOT
from .hopper_builds import Case, built

GOLDEN = ROOT / "tests/golden/hopper_code.json"


def digest(ptx: str) -> str:
    """SHA-256 (hex) of the instructions, without what says from which line of a source they come."""
    lines = [line.split("//")[0].strip() for line in ptx[ptx.index(".entry") :].splitlines()]
    end = next((i for i, line in enumerate(lines) if line.startswith((".file", ".section"))), len(lines))
    code = [line for line in lines[:end] if line and not line.startswith((".loc", "$L__tmp", "$L__func"))]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()


@functools.cache
def golden() -> dict[str, str]:
    """The committed digests, by case."""
    found: dict[str, str] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return found


def main() -> None:
    from ..kernels.hopper.backward import test_budgets as bands
    from ..kernels.hopper.backward import test_data_budgets as data
    from ..kernels.hopper.backward import test_dropout_budgets as dropout
    from ..kernels.hopper.backward import test_varlen_budgets as varlen

    cases: list[Case] = [*bands.CASES, *data.SOON, *data.LATER, *dropout.CASES, *varlen.BACKWARDS]
    print(json.dumps({str(case): digest(built(case).ptx) for case in cases}, indent=1))


if __name__ == "__main__":
    main()
