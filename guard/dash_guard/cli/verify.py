"""``dash-guard verify script.py ...``: runs a script twice in fresh processes, and compares the runs."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from dash_inductor.cli import outputs
from dash_inductor.errors import ArgumentError

from . import compare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, help="keep both recordings here; by default only if they differ")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page about the result")
    parser.add_argument(
        "--junit", type=Path, metavar="FILE", help="also write the result as a test case for CI (JUnit)"
    )
    parser.add_argument("-m", action="store_true", dest="module", help="run a module, as python -m does")
    parser.add_argument("script", help="the script, or the name of a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    parser.epilog = (
        "exit status: 0 equal, 1 diverged, 2 not comparable, or an error, also of the script, 130 interrupted"
    )


def run(arguments: argparse.Namespace) -> int:
    from ..recorder.verify import verify

    if not arguments.module and not Path(arguments.script).is_file():
        raise ArgumentError("script", arguments.script, "a file that exists, or with -m the name of a module")
    outputs.check("html", arguments.html)
    outputs.check("junit", arguments.junit)
    outputs.check_folder("folder", arguments.folder)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="dash-inductor-verify-"))
    words = [*(["-m"] if arguments.module else []), arguments.script, *arguments.arguments]
    kept = arguments.folder is not None
    subject = shlex.join(words)
    try:
        with compare.errors_in_junit(arguments, subject):
            result = verify(words, folder, lambda text: print(text, file=sys.stderr, flush=True))
        kept = kept or result.exit_code != 0
    finally:
        if not kept:
            shutil.rmtree(folder)
    if not kept:
        result = replace(result, a="run 1 of 2, not kept", b="run 2 of 2, not kept")
    return compare.show(result, arguments, subject)
