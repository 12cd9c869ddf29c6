"""``dash-inductor doctor [script.py ...]``: finds what keeps dash_inductor, or determinism, from working."""

from __future__ import annotations

import argparse
import contextlib
import json
import runpy
import sys
from pathlib import Path

from ..errors import ArgumentError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``dash-inductor doctor``."""
    parser.add_argument(
        "--once",
        action="store_true",
        help="do not run the first step of the program again to see whether it computes the same bits",
    )
    parser.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        help="a program and its arguments: it is run, and the settings that it makes are looked at when it compiles; "
        "control-C ends it early",
    )
    parser.epilog = "Exit status: 0 with nothing but notes, 1 with warnings, 2 with errors."


def run(arguments: argparse.Namespace) -> int:
    """Prints the doctor's findings; returns 0 for facts and notes alone, 1 with warnings, 2 with errors."""
    from .. import doctor
    from ..doctor.report import format_report, summary

    if arguments.script:
        if not Path(arguments.script[0]).is_file():
            raise ArgumentError("script", arguments.script[0], "the path of a Python file")
        findings = doctor.diagnose_program(
            lambda: _run_script(arguments.script), arguments.script[0], not arguments.once
        )
    else:
        findings = doctor.diagnose()
    code = doctor.exit_code(findings)
    if arguments.json:
        shown = {"exit_code": code, "summary": summary(findings), "findings": [one.as_dict() for one in findings]}
        print(json.dumps(shown, indent=2))
    else:
        print(format_report(findings, colours=sys.stdout.isatty()))
    return code


def _run_script(words: list[str]) -> None:
    """Runs a script as ``python script.py ...`` does, with its stdout redirected to stderr."""
    script = Path(words[0])
    argv, path = sys.argv, list(sys.path)
    sys.argv, sys.path[0:0] = words, [str(script.parent)]
    try:
        with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(KeyboardInterrupt):
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as left:
        if left.code not in (None, 0):
            print(f"{script} ended with {left.code!r}", file=sys.stderr)
    finally:
        sys.argv, sys.path[:] = argv, path
