"""The console command `dash-inductor`, which is also ``python -m dash_inductor``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from .._untrusted import printable_lines
from ..errors import DashError
from ..version import __version__

COMMANDS = {
    "compare": "finds the first step, rank and tensor in which two recorded runs differ",
    "doctor": "checks versions, hooks, caches and settings, and says what to do",
    "dump": "compiles a script's graphs and writes a folder of pages about every one of them",
    "explain": "compiles a script and prints what becomes of every attention, and why",
    "plan": "prints the plan for a shape and a mask, and all candidates; draws their timelines",
    "report": "shows what a guard has found and checked",
    "verify": "runs a script twice in fresh processes and compares what they computed",
    "watch": "watches a training run: who hangs, has died, is slow or computes wrongly",
}
"""The subcommands, with what each of them does.  The module of this folder with a command's name has two functions.

    add_arguments(parser: argparse.ArgumentParser) -> None
    run(arguments: argparse.Namespace) -> int                the exit status

``arguments.json`` asks for one JSON document on the standard output and nothing else there.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default the program's own.

    Returns:
        The exit status of the command; 2 for an error, which is on the standard error, for a defect of this package,
        with its traceback, and if nobody reads the output.  1 is an answer of the command, and nothing else.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in words if not word.startswith("-")), "")
    parser = argparse.ArgumentParser("dash-inductor", description="Deterministic attention for torch.compile.")
    parser.add_argument("--version", action="version", version=f"dash_inductor {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, does in COMMANDS.items():
        command = commands.add_parser(name, help=does, description=f"{does[0].upper()}{does[1:]}.")
        command.add_argument("--json", action="store_true", help="print one JSON document")
        if name == chosen:  # the others are not imported: some bring torch along
            importlib.import_module(f".{name}", __name__).add_arguments(command)
    arguments = parser.parse_args(words)
    try:
        return int(importlib.import_module(f".{arguments.command}", __name__).run(arguments))
    except DashError as error:
        print(printable_lines(f"dash-inductor {arguments.command}: {error}"), file=sys.stderr)
    except BrokenPipeError:  # whoever reads the output has seen enough, as `head` has
        drop_output()
    except Exception:
        print(printable_lines(traceback.format_exc()), file=sys.stderr)
    return 2


def drop_output() -> None:
    """Forget what waits to be printed, which the interpreter would try to write at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
