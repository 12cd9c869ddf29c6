"""Runs a command line with subcommands, each of which is a module; used by `dash-inductor` and `dash-guard`."""

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
    """Runs a command line, by default that of this process.

    The module of `package` with a subcommand's name has two functions:

        add_arguments(parser: argparse.ArgumentParser) -> None
        run(arguments: argparse.Namespace) -> int                the exit status

    If ``arguments.json`` is set, `run` must print a single JSON document on stdout and nothing else.

    Args:
        program: the name of the command.
        description: its description for ``--help``.
        version: the text that ``--version`` prints.
        package: the package with the subcommands' modules.
        commands: the subcommands and what they do.
        argv: the arguments of the command.

    Returns:
        The exit status of the subcommand; 2 after an error, whose message is printed on stderr (a traceback for an
        unexpected one), and if the reader of stdout has closed it; 130 after an interruption (control-C).
    """
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in words if not word.startswith("-")), "")
    parser = argparse.ArgumentParser(program, description=description)
    parser.add_argument("--version", action="version", version=version)
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, does in commands.items():
        command = subparsers.add_parser(name, help=does, description=f"{does[0].upper()}{does[1:]}.")
        command.add_argument("--json", action="store_true", help="print one JSON document")
        if name == chosen:  # the others are not imported, because some import torch
            importlib.import_module(f".{name}", package).add_arguments(command)
    arguments = parser.parse_args(words)
    try:
        return int(importlib.import_module(f".{arguments.command}", package).run(arguments))
    except DashError as error:
        print(printable_lines(f"{program} {arguments.command}: {error}"), file=sys.stderr)
    except BrokenPipeError:  # the reader of the output has closed it, as `head` does
        drop_output()
    except KeyboardInterrupt:
        print(f"{program} {arguments.command}: interrupted", file=sys.stderr)
        return 130
    except Exception:
        print(printable_lines(traceback.format_exc()), file=sys.stderr)
    return 2


def drop_output() -> None:
    """Discards buffered output, which the interpreter would otherwise try to write at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
