"""The doctor: finds what keeps dash_inductor from working, or training from being deterministic.

    diagnose()                      checks this machine and this process, as ``dash-inductor doctor`` prints it
    diagnose_program(run)           also runs a program, and checks the settings that it makes and what it does

Every check is a small function in one of the lists `machine.CHECKS`, `settings.CHECKS`, `program.COMPILING` and
`program.AFTERWARDS`, or a method of `running.Running`, which watches a program while it runs.
"""

from __future__ import annotations

from .diagnosis import diagnose, diagnose_program
from .findings import Finding, Severity, exit_code

__all__ = ["Finding", "Severity", "diagnose", "diagnose_program", "exit_code"]
