"""The console command `dash-inductor`, which is also ``python -m dash_inductor``."""

from __future__ import annotations

from collections.abc import Sequence

from ..version import __version__
from . import command

COMMANDS = {
    "doctor": "checks versions, hooks, caches and settings, and says what to do",
    "dump": "compiles a script's graphs and writes a folder of pages about every one of them",
    "explain": "compiles a script and prints what becomes of every attention, and why",
    "plan": "prints the plan for a shape and a mask, and all candidates; draws their timelines",
}
"""The subcommands and what they do; each is a module of this folder, see `command.run`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`, by default that of this process; returns the exit status of `command.run`."""
    description = "Deterministic attention for torch.compile."
    return command.run("dash-inductor", description, f"dash_inductor {__version__}", __name__, COMMANDS, argv)
