"""Running all checks, for a machine or while a program compiles."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from . import machine, program, settings
from .findings import Finding, Severity, run
from .running import Running


def diagnose() -> tuple[Finding, ...]:
    """Everything that there is to say about this machine and this process, in the order of the checks.

    Settings that a program makes in its own process are not seen; call it there, or use `diagnose_program`.
    """
    return tuple(run((*machine.CHECKS, *settings.CHECKS)))


def diagnose_program(
    run_program: Callable[[], object], name: str = "the program", repeat: bool = True
) -> tuple[Finding, ...]:
    """As `diagnose`, and what there is to say about a program: its settings whenever it compiles, and what it does.

    Args:
        run_program: runs the program, in this thread.  No graph is taken from a cache.  An exception that ends it is a
            finding, and its traceback goes to the standard error.
        name: what findings call the program, for example its file.
        repeat: run the forwards and backwards of its first step again, to see whether they compute the same bits.
    """
    found: dict[Finding, None] = dict.fromkeys(run(machine.CHECKS))
    running = Running(name, repeat)
    with running.watched(), program.watching(found, running):
        try:
            run_program()
        except Exception as error:
            traceback.print_exc()
            what = f"the program ended with {type(error).__name__}{_first_line(error)}"
            found[Finding("program", Severity.WARNING, what, "Its traceback is on the standard error.")] = None
    found.update(dict.fromkeys(run((*program.AFTERWARDS, *running.checks))))
    return tuple(found)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f": {lines[0]}" if lines else ""
