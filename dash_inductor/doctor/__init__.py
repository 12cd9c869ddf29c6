"""Finds what keeps dash_inductor from its work, or training from being deterministic, on a machine or in a program.

    diagnose()                      this machine and this process, as ``dash-inductor doctor`` prints it
    diagnose_program(run)           the same while a program runs: what it sets and does by itself counts too

Every check is a small function in one of the lists `machine.CHECKS`, `settings.CHECKS`, `program.COMPILING` and
`program.AFTERWARDS`, or a method of `running.Running`, which looks at a program while it runs.
"""

from __future__ import annotations

from .diagnosis import diagnose, diagnose_program
from .findings import Finding, Severity, exit_code

__all__ = ["Finding", "Severity", "diagnose", "diagnose_program", "exit_code"]
