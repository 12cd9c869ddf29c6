"""Runs a command line of subcommands, each of which is a module: that of `dash-inductor`, and that of `dash-guard`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence

from ..errors import DashError
from ..untrusted import printable_lines


def run(
    program: str, description: str, version: str, package: str, commands: Mapping[str, str], argv: Sequence[str] | None
) -> int:
    """Run a command line, by default that of this process.

    The module of `package` with a subcommand's name has two functions:

        add_arguments(parser: argparse.ArgumentParser) -> None
        run(arguments: argparse.Namespace) -> int                the exit status

    ``arguments.json`` asks for one JSON document on the standard output and nothing else there.

    Args:
        program: the name of the command.
        description: what it is for.
        version: what ``--version`` prints after the name of the distribution.
        package: the package of the subcommands' modules.
        commands: the subcommands, with what each of them does.
        argv: the words after the name of the command.

    Returns:
        The exit status of the subcommand; 2 for an error, which is printed on the standard error, for a defect of the
        package, with its traceback, and if nobody reads the output.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in words if not word.startswith("-")), "")
    parser = argparse.ArgumentParser(program, description=description)
    parser.add_argument("--version", action="version", version=version)
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, does in commands.items():
        command = subparsers.add_parser(name, help=does, description=f"{does[0].upper()}{does[1:]}.")
        command.add_argument("--json", action="store_true", help="print one JSON document")
        if name == chosen:  # the others are not imported: some bring torch along
            importlib.import_module(f".{name}", package).add_arguments(command)
    arguments = parser.parse_args(words)
    try:
        return int(importlib.import_module(f".{arguments.command}", package).run(arguments))
    except DashError as error:
        print(printable_lines(f"{program} {arguments.command}: {error}"), file=sys.stderr)
    except BrokenPipeError:  # whoever reads the output has seen enough, as `head` has
        drop_output()
    except Exception:
        print(printable_lines(traceback.format_exc()), file=sys.stderr)
    return 2


def drop_output() -> None:
    """Forget what waits to be printed, which the interpreter would try to write at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
