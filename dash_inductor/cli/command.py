"""Runs a command line with subcommands, each of which is a module; used by `dash-inductor` and `dash-guard`."""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import os
import shlex
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence

from ..errors import ArgumentError, DashError
from ..untrusted import printable_lines
from . import outputs


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
        unexpected one), if stdout cannot be written, and if its reader has closed it; 130 after an interruption
        (control-C).
    """
    words = list(sys.argv[1:] if argv is None else argv)
    completes = "_ARGCOMPLETE" in os.environ  # a shell asks for completions of a line that it gives in a variable
    chosen = next((word for word in words if not word.startswith("-")), "")
    parser = argparse.ArgumentParser(program, description=description)
    parser.add_argument("--version", action="version", version=version)
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, does in commands.items():
        command = subparsers.add_parser(name, help=does, description=f"{does[0].upper()}{does[1:]}.")
        command.add_argument("--json", action="store_true", help="print one JSON document")
        if name == chosen or completes:  # the others are not imported, because that takes time
            importlib.import_module(f".{name}", package).add_arguments(command)
    if completes:
        importlib.import_module("argcomplete").autocomplete(parser)
    if chosen and chosen not in commands:
        parser.error(_unknown(chosen, commands))
    arguments = parser.parse_args(words)

    def say(text: object) -> None:
        print(printable_lines(f"{program} {arguments.command}: {text}"), file=sys.stderr)

    try:
        outputs.check_stdout()
        outputs.escape_unprintable()
        status = int(importlib.import_module(f".{arguments.command}", package).run(arguments))
        sys.stdout.flush()
        return status
    except ArgumentError as error:
        say(_with_flag(error, arguments, words))
    except DashError as error:
        say(error)
    except BrokenPipeError:  # the reader of the output has closed it, as `head` does
        drop_output()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            say(traceback.format_exc())
        else:
            drop_output()
            say(f"{error.filename or 'the standard output'} cannot be written: {error.strerror}")
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except Exception:
        print(printable_lines(traceback.format_exc()), file=sys.stderr)
    return 2


def _unknown(command: str, commands: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(command, commands, n=1)
    meant = f"did you mean {nearest[0]}?" if nearest else f"expected one of {', '.join(commands)}"
    return f"there is no command {command!r}: {meant}"


def _with_flag(error: ArgumentError, arguments: argparse.Namespace, words: Sequence[str]) -> str:
    """The message of an error, which names the flag as it was typed if it is about the value of one."""
    flag = "--" + error.name.replace("_", "-")
    short = flag[1:3]  # --output is -o, too
    before = [word.partition("=")[0] for word in words]
    typed = next((word for word in before if word == short or (len(word) > 2 and flag.startswith(word))), None)
    given = getattr(arguments, error.name, None)
    texts = map(str, given if isinstance(given, list) else [given])
    if typed is None or not any(str(error.value) in text for text in texts):
        return str(error)
    return f"{typed} {shlex.quote(str(error.value))} is not allowed: expected {error.allowed}"


def drop_output() -> None:
    """Discards buffered output, which the interpreter would otherwise try to write at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
