"""Observes the first step of a program: which operators respect the flag, and whether a second run gives equal bits."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx import Graph

from ..errors import described
from ..observers import active, hooks
from ..observers.names import unwrapped
from ..observers.observer import Observer
from ..upstream.dynamo import skip_code
from ..upstream.eager import in_backward, not_compiled
from ..upstream.patches import replaced
from .findings import Check, Seen, Severity
from .foreign import Foreign
from .heard import Heard
from .reading import Reading, foreign_modes
from .repeating import repeating

_OK, NOTE, _WARNING, _ERROR = Severity


class Step(Observer):
    """Observes the first training step of a program, inside the context `watched`.

    Args:
        repeat: whether to run its forwards and backwards again.

    Attributes:
        repeats: whether a forward or backward is being repeated now.
    """

    def __init__(self, repeat: bool = True) -> None:
        self._wanted = repeat
        self._thread, self._depth = threading.get_ident(), 0
        self.reading = Reading()
        self.heard = Heard(self.reading)
        self.foreign = Foreign()
        self.reading.flagged = self.foreign.told
        self._repeat, self._not_repeated = None, "dash_guard, which does that, is not installed"
        if repeat:
            try:
                self._repeat = repeating(self._again)
            except Exception as error:  # of another distribution, without which all other checks go on
                self._not_repeated = described(error)
        self.repeats = self._trained = False
        self.checks: tuple[Check, ...] = (*self.heard.checks, *self.foreign.checks, self.two_runs)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A context manager that observes the program that runs in its block."""
        hooks.install()
        observers: list[Observer] = [self] if self._repeat is None else [self, self._repeat]
        active.observers += observers
        try:
            with replaced(torch.autograd, {"backward": self._backward()}), self.reading:
                yield
        finally:
            if self._repeat is not None:
                self._repeat.end()
            for observer in observers:
                active.observers.remove(observer)

    @contextmanager
    def _again(self) -> Iterator[None]:
        """A context for a repetition."""
        before, self.repeats = self.repeats, True
        try:
            with self.reading.quiet():
                yield
        finally:
            self.repeats = before

    def not_looking(self) -> AbstractContextManager[None]:
        """A context manager in which no operator is recorded, for work outside of the program, such as a compile."""
        return self.reading.quiet()

    def compiled(self, graph: Graph) -> None:
        """Records the operators of a graph that Inductor is about to compile."""
        self.heard.happened("a graph was compiled")
        self.reading.compiled(graph)

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes that the backward has ended, since an optimizer steps; ends the recording before its second step."""
        self._ended()
        self.reading.before_step(optimizer)

    def module_begins(self, module: nn.Module) -> None:
        """Records the forward of an outermost module with gradients, before which the flag should have been set."""
        if threading.get_ident() == self._thread:
            self._depth += 1
            if self._depth == 1 and torch.is_grad_enabled() and not in_backward() and not foreign_modes():
                self._began(module)

    def module_ended(self, module: nn.Module, result: Any) -> None:
        """Records the end of a module's forward."""
        if threading.get_ident() == self._thread:
            self._depth = max(0, self._depth - 1)

    @not_compiled
    def _began(self, module: nn.Module) -> None:
        if not self.repeats:
            self.heard.happened(f"{type(unwrapped(module)).__name__} was called")

    def _backward(self) -> Callable[..., Any]:
        plain: Any = torch.autograd.backward

        @functools.wraps(plain)
        def backward(*args: Any, **kwargs: Any) -> None:
            outermost = not in_backward()
            plain(*args, **kwargs)
            if outermost and not torch.compiler.is_compiling():
                self._ended()

        ours: Any = backward
        skip_code(ours.__code__)
        return backward

    @not_compiled
    def _ended(self) -> None:
        self._trained = True
        self.heard.trained()
        if self._repeat is not None:
            self._repeat.backward_ended()

    def two_runs(self) -> Iterator[Seen]:
        """Checks whether the modules of the first step gave equal bits when they were run again."""
        if not self._wanted or not self._trained:
            return
        if self._repeat is None:
            what = f"the first step was not run again: {self._not_repeated}"
            yield NOTE, what, "python -m pip install 'dash-inductor[guard]'"
        else:
            yield from self._repeat.shown(lambda module: [*self.heard.at(module), *self.foreign.at(module)])
