"""``dash-guard watch -- torchrun ... train.py``: names ranks that hang, have died, are slow or compute wrongly."""

from __future__ import annotations

import argparse
from pathlib import Path

from dash_inductor.cli import outputs
from dash_inductor.errors import ArgumentError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=Path("guard"), help="where findings go (default: guard)")
    parser.add_argument(
        "--listen", metavar="HOST:PORT", help="where ranks of other nodes reach this one; needs a secret"
    )
    parser.add_argument("--join", metavar="HOST:PORT", help="the wrapper of the first node; needs its secret")
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        help="a setting: every, at_rest, cross_rank_recompute, same_rank_recompute, collectives, on_confirmed",
    )
    parser.add_argument("--strict", action="store_true", help="end with status 12 if the job could not be watched")
    parser.add_argument(
        "--fail-on",
        choices=("suspect", "confirmed"),
        metavar="SEVERITY",
        help="end with status 10 or 11 after findings of this severity (suspect or confirmed) or a higher one",
    )
    parser.add_argument("--metrics", metavar="HOST:PORT", help="serve metrics there (needs prometheus_client)")
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="-- PROGRAM", help="the launcher and its arguments"
    )
    parser.epilog = (
        "exit status: that of the program; if that is 0, with --fail-on: 10 after a finding about a machine, the "
        "network or an unknown cause, 11 after one about the program; with --strict: 12 if the job could not be watched"
    )


def run(arguments: argparse.Namespace) -> int:
    from ..monitor.wrapper import Wrapper

    program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not program:
        raise ArgumentError("program", "nothing", "a program with its arguments, after --")
    outputs.check_folder("folder", arguments.folder)
    return Wrapper(
        program,
        arguments.folder,
        arguments.listen,
        arguments.join,
        arguments.strict,
        arguments.metrics,
        arguments.set,
        arguments.fail_on,
    ).run()
