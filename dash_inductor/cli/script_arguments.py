"""The command line arguments of commands that run a script: the script, its arguments, and how long it runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import ArgumentError

RUNS = """\
The script runs in this process; what it prints goes to the standard error.  If it trains, it ends before the optimizer
steps again, see --stop-after.  Control-C ends it too: what was seen until then is shown."""
"""How scripts run, for the help of a command."""


def add_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Adds the arguments of a script to a command.

    Args:
        parser: the parser of the command.
        required: whether the command needs a script.
    """
    parser.add_argument(
        "--stop-after", type=int, default=1, metavar="N",
        help="end a script that trains after N training steps (steps of its optimizers); 0: run it to its end; "
        "default: %(default)s",
    )  # fmt: skip
    what = "a Python file that compiles and runs a training step"
    parser.add_argument("script", nargs=None if required else "?", help=what)
    parser.add_argument("script_arguments", metavar="arguments", nargs=argparse.REMAINDER, help="of the script")


def check(arguments: argparse.Namespace) -> None:
    """Raises ArgumentError for a script that is not there, or a number of steps below 0."""
    if arguments.script is not None and not Path(arguments.script).is_file():
        raise ArgumentError("script", arguments.script, "a file that exists")
    if arguments.stop_after < 0:
        raise ArgumentError("stop_after", arguments.stop_after, "a number of training steps, or 0 for all")
