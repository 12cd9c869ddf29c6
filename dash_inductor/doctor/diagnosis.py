"""The entry points of the doctor: run all checks of the machine, or of a program while it runs."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from ..observers.scripts import INTERRUPTED, Stopped
from . import machine, program, settings
from .findings import Finding, Severity, run
from .running import Running


def diagnose() -> tuple[Finding, ...]:
    """Returns all findings about this machine and this process, in the order of the checks.

    Settings that another program makes in its own process are not visible here; call this function there, or use
    `diagnose_program`.
    """
    return tuple(run((*machine.CHECKS, *settings.CHECKS)))


def diagnose_program(
    run_program: Callable[[], object],
    name: str = "the program",
    repeat: bool = True,
    batch_invariance: bool = False,
) -> tuple[Finding, ...]:
    """Runs a program, and returns all findings about the machine, the program's settings at each compile, and what it
    does.

    Args:
        run_program: runs the program, in this thread.  No graph is loaded from a cache.  An exception that ends it
            becomes a finding, and its traceback is printed on stderr.  An interruption becomes a finding too.
        name: the name of the program in findings, for example its file.
        repeat: whether to run the forwards and backwards of its first step again, to compare their bits.
        batch_invariance: whether to name the operators of compiled graphs whose bits may depend on the number of rows.
    """
    found: dict[Finding, None] = dict.fromkeys(run(machine.CHECKS))
    running = Running(name, repeat)
    operators = None
    if batch_invariance:
        from .batch_invariance import BatchInvariance  # imports Inductor, without which all other checks go on

        operators = BatchInvariance()
    with running.watched(), program.watching(found, running, operators):
        try:
            run_program()
        except (Stopped, KeyboardInterrupt) as end:
            words = str(end) if isinstance(end, Stopped) else INTERRUPTED
            found[Finding("program", Severity.NOTE, f"the program was {words}")] = None
        except Exception as error:
            traceback.print_exc()
            what = f"the program ended with {type(error).__name__}{_first_line(error)}"
            found[Finding("program", Severity.WARNING, what, "Its traceback is on the standard error.")] = None
    asked = () if operators is None else (operators.batch_invariance,)
    found.update(dict.fromkeys(run((*program.AFTERWARDS, *running.checks, *asked))))
    return tuple(found)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f": {lines[0]}" if lines else ""
