"""``dash-inductor explain script.py [arguments]``: prints how every attention that a script compiles was handled."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..model.architectures import ARCHS
from . import outputs, script_arguments

EPILOG = f"""
{script_arguments.RUNS}  Exit status: 0 if everything was replaced, 1 if
something was not replaced, if nothing was seen or if the script failed or was interrupted, 2 for bad arguments.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``dash-inductor explain``."""
    parser.epilog = EPILOG
    parser.add_argument("--arch", help=f"plan for this device, which need not be there: {ARCHS}")
    parser.add_argument("--html", metavar="FILE", type=Path, help="also write the report as a page")
    script_arguments.add_arguments(parser, required=True)


def run(arguments: argparse.Namespace) -> int:
    """Explains the script; returns 0 if it ended without an error and all attention is replaced, else 1."""
    from ..explanations.script import explain_script

    script_arguments.check(arguments)
    outputs.check("html", arguments.html)
    explanation, ended = explain_script(
        arguments.script, arguments.script_arguments, arguments.arch, arguments.stop_after
    )
    if arguments.html is not None:
        outputs.write(arguments.html, explanation.to_html())
    if arguments.json:
        print(json.dumps(explanation.to_dict(), indent=2))
    else:
        print(explanation.to_text(outputs.columns()))
    return 0 if ended and explanation.all_replaced else 1
