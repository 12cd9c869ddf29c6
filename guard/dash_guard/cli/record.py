"""``dash-guard record --folder runs/a -- torchrun ... train.py``: records fingerprints of what processes compute."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from dash_inductor.cli import outputs
from dash_inductor.errors import ArgumentError, DashError

from ..recorder.start import STOP_AFTER, VALUES, VARIABLE
from . import compare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=Path("recording"), help="gets a file of each rank")
    parser.add_argument(
        "--resume-check",
        type=Path,
        metavar="RUN",
        help="the program resumes from a checkpoint of this recorded run: end it after one step, and compare this step",
    )
    parser.add_argument(
        "--values", action="store_true", help="also write values of gradients and parameters, for compare --layouts"
    )
    parser.set_defaults(html=None, junit=None)
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM", help="a program and its arguments")
    parser.epilog = (
        "exit status: that of the program; 2 if it cannot be run, or has recorded nothing; with --resume-check, if the "
        "program succeeds: 0 equal, 1 diverged, 2 not comparable"
    )


def run(arguments: argparse.Namespace) -> int:
    program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not program:
        raise ArgumentError("program", "nothing", "a program with its arguments, after --")
    outputs.check_folder("folder", arguments.folder)
    before = arguments.resume_check
    if before is not None and not any(before.glob("rank*.dash")):
        raise ArgumentError(
            "resume_check", str(before), "a folder with the recording of the run that was not interrupted"
        )
    folder = arguments.folder.absolute()
    if any(folder.glob("rank*.dash")):
        raise DashError(f"{folder} has a recording already: name another folder, or remove it")
    environment = {**os.environ, VARIABLE: str(folder)}
    if arguments.values:
        environment[VALUES] = "1"
    output = None
    if before is not None:
        environment[STOP_AFTER], output = "1", sys.stderr
    try:
        status = subprocess.run(program, env=environment, stdout=output, check=False).returncode
    except OSError as error:
        raise ArgumentError("program", program[0], f"a program that can be run: {error.strerror}") from error
    if status:
        return status if status > 0 else 128 - status  # as a shell says that a signal has ended a program
    if not any(folder.glob("rank*.dash")):
        raise DashError(f"{program[0]} has left no recording: it called no module and no optimizer of PyTorch")
    if before is None:
        return 0
    from ..recordings.compare import compare as compared

    return compare.show(compared(before, folder, resumed=True), arguments, f"{before} and {folder}")
