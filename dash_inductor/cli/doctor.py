"""``dash-inductor doctor [script.py ...]``: finds what keeps dash_inductor, or determinism, from working."""

from __future__ import annotations

import argparse
import json
import sys

from ..errors import ArgumentError
from . import outputs, script_arguments

EPILOG = f"""
With a script, the settings that it makes are looked at when it compiles.  {script_arguments.RUNS}  Exit status: 0 with
nothing but notes, 1 with warnings, 2 with errors.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``dash-inductor doctor``."""
    parser.add_argument(
        "--once",
        action="store_true",
        help="do not run the first step of the program again to see whether it computes the same bits",
    )
    parser.add_argument(
        "--batch-invariance",
        action="store_true",
        help="also name operators of compiled graphs whose bits may depend on the batch size or the number of tokens",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="also print what is as it should be")
    script_arguments.add_arguments(parser, required=False)
    parser.epilog = EPILOG


def run(arguments: argparse.Namespace) -> int:
    """Prints the doctor's findings; returns 0 for facts and notes alone, 1 with warnings, 2 with errors."""
    from .. import doctor
    from ..doctor.report import format_report, summary

    script_arguments.check(arguments)
    if arguments.script is None:
        if arguments.batch_invariance:
            raise ArgumentError("script", None, "a script, whose graphs --batch-invariance reads")
        findings = doctor.diagnose()
    else:
        findings = doctor.diagnose_program(
            lambda: _run(arguments), arguments.script, not arguments.once, arguments.batch_invariance
        )
    code = doctor.exit_code(findings)
    if arguments.json:
        shown = {"exit_code": code, "summary": summary(findings), "findings": [one.as_dict() for one in findings]}
        print(json.dumps(shown, indent=2))
    else:
        colours = sys.stdout.isatty()
        print(format_report(findings, verbose=arguments.verbose, colours=colours, width=outputs.columns()))
    return code


def _run(arguments: argparse.Namespace) -> None:
    """Runs the script; its exit status is no error of the doctor, and is printed."""
    from ..observers.scripts import Stopped, run_script

    try:
        run_script(arguments.script, arguments.script_arguments, arguments.stop_after)
    except Stopped:
        raise
    except SystemExit as left:
        if left.code not in (None, 0):
            print(f"{arguments.script} ended with {left.code!r}", file=sys.stderr)
