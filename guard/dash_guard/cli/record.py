"""``dash-guard record --folder runs/a -- torchrun ... train.py``: records fingerprints of what processes compute."""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path

from dash_inductor.cli import outputs
from dash_inductor.errors import ArgumentError, DashError

from ..recorder.start import VARIABLE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=Path("recording"), help="gets a file of each rank")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM", help="a program and its arguments")
    parser.epilog = "exit status: that of the program; 2 if it cannot be run, or has recorded nothing"


def run(arguments: argparse.Namespace) -> int:
    program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not program:
        raise ArgumentError("program", "nothing", "a program with its arguments, after --")
    outputs.check_folder("folder", arguments.folder)
    folder = arguments.folder.absolute()
    if any(folder.glob("rank*.dash")):
        raise DashError(f"{folder} has a recording already: name another folder, or remove it")
    try:
        status = subprocess.run(program, env={**os.environ, VARIABLE: str(folder)}, check=False).returncode
    except OSError as error:
        raise ArgumentError("program", program[0], f"a program that can be run: {error.strerror}") from error
    if status:
        return status if status > 0 else 128 - status  # as a shell says that a signal has ended a program
    if not any(folder.glob("rank*.dash")):
        raise DashError(f"{program[0]} has left no recording: it called no module and no optimizer of PyTorch")
    return 0
