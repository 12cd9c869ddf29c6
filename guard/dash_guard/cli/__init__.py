"""The console command `dash-guard`, which is also ``python -m dash_guard``."""

from __future__ import annotations

from collections.abc import Sequence

from dash_inductor.cli import command

from ..version import __version__

COMMANDS = {
    "compare": "finds the first step, rank and tensor in which two recorded runs differ",
    "record": "runs a program and records fingerprints of what it computes",
    "report": "shows the findings and what was checked",
    "verify": "runs a script twice in fresh processes and compares what they computed",
    "watch": "watches a training run and names ranks that hang, have died, are slow or compute wrongly",
}
"""The subcommands, with what each of them does; each is a module of this folder, see `command.run`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default that of this process; returns the exit status of the subcommand."""
    description = "Finds the rank of a training run that computes wrongly, hangs, has died or lags; compares runs."
    return command.run("dash-guard", description, f"dash_guard {__version__}", __name__, COMMANDS, argv)
