"""Runs a user's script in this process, as ``python script.py`` does, to its end or for some training steps."""

from __future__ import annotations

import runpy
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..upstream.eager import not_compiled


class Stopped(SystemExit):
    """Raised in a program that has made as many training steps as it was to make; no program catches it by accident.

    A program that nobody watches ends with exit status 0.
    """

    def __init__(self, text: str) -> None:
        super().__init__(0)
        self._text = text

    def __str__(self) -> str:
        return self._text


INTERRUPTED = "interrupted: nothing is known about what it would have done afterwards"
"""What is said about a script that control-C has ended, behind its subject."""


def run_script(path: str, arguments: Sequence[str], stop_after: int = 0) -> None:
    """Runs a script; its stdout is redirected to stderr.

    Args:
        path: the script.
        arguments: its arguments.
        stop_after: as for `stopping_after`.

    Raises:
        Stopped: the script was about to make a further training step; the message says so, behind its subject.
        BaseException: what the script raises.
    """
    with _as_program([path, *arguments]), redirect_stdout(sys.stderr), stopping_after(stop_after):
        runpy.run_path(path, run_name="__main__")


@contextmanager
def stopping_after(steps: int) -> Iterator[None]:
    """A context manager that ends a program in its block after some training steps.

    The program ends before an optimizer steps again that has stepped so often, so that all its optimizers have stepped.

    Args:
        steps: the number of training steps; 0 for a program that runs to its end.

    Raises:
        Stopped: the program is about to make a further step.
    """
    made = Counter[int]()
    known: list[torch.optim.Optimizer] = []  # keeps optimizers alive, so that their ids stay unique

    @not_compiled
    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if made[id(optimizer)] == steps:
            raise Stopped(f"stopped after {steps} training step{'s' * (steps > 1)}; --stop-after 0 lets it run on")
        known.append(optimizer)
        made[id(optimizer)] += 1

    if not steps:
        yield
        return
    hook = register_optimizer_step_pre_hook(before_step)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _as_program(argv: list[str]) -> Iterator[None]:
    """Sets `sys.argv` and the first folder of `sys.path` for a script inside the block."""
    before = sys.argv, sys.path[:]
    sys.argv, sys.path = argv, [str(Path(argv[0]).resolve().parent), *sys.path]
    try:
        yield
    finally:
        sys.argv, sys.path = before
