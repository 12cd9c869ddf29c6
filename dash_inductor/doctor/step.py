"""The first step of a program: which of its operators hear the flag, and whether it computes the same bits again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx import Graph

from ..observers import active, hooks
from ..observers.names import unwrapped
from ..observers.observer import Observer
from ..upstream.dynamo import skip_code
from ..upstream.eager import in_backward, not_compiled
from ..upstream.patches import replaced
from .findings import Check, Seen, Severity
from .foreign import Foreign
from .heard import Heard
from .reading import Reading
from .twice import RUNS, Outcome, Twice

OK, NOTE, WARNING, ERROR = Severity


class Step(Observer):
    """Looks at the first step of a program, inside `watched`.

    Args:
        repeat: whether its forwards and backwards are run again.

    Attributes:
        repeats: whether what runs now is a repetition.
    """

    def __init__(self, repeat: bool = True) -> None:
        self._repeat = repeat
        self.reading = Reading()
        self.heard = Heard(self.reading)
        self.foreign = Foreign()
        self.reading.flagged = self.foreign.told
        self._twice = Twice(self._again, repeat)
        self._twice.began = self._began
        self.repeats = self._trained = False
        self.checks: tuple[Check, ...] = (*self.heard.checks, *self.foreign.checks, self.two_runs)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at what runs in the block."""
        hooks.install()
        observers: list[Observer] = [self, self._twice]
        active.observers += observers
        try:
            with replaced(torch.autograd, {"backward": self._backward()}), self.reading:
                yield
        finally:
            self._twice.end()
            for observer in observers:
                active.observers.remove(observer)

    @contextmanager
    def _again(self) -> Iterator[None]:
        """A block that is a repetition."""
        before, self.repeats = self.repeats, True
        try:
            with self.reading.quiet():
                yield
        finally:
            self.repeats = before

    def not_looking(self) -> AbstractContextManager[None]:
        """A block that is no part of the program, such as a compile."""
        return self.reading.quiet()

    def compiled(self, graph: Graph) -> None:
        """Inductor is about to compile a graph."""
        self.heard.happened("a graph was compiled")
        self.reading.compiled(graph)

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step: gradients are there, by whatever backward."""
        self._ended()
        self.reading.before_step(optimizer)

    def _began(self, module: nn.Module) -> None:
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
        self._twice.backward_ended()

    def two_runs(self) -> Iterator[Seen]:
        """Whether the modules of the first step compute the same bits again."""
        if not self._repeat or not self._trained:
            return
        outcomes = self._twice.outcomes
        for outcome in outcomes:
            if outcome.unknown:
                what = f"whether {outcome.root} computes the same bits twice is unknown: {outcome.unknown}"
                yield NOTE, what, "Run the program twice and compare: dash-inductor verify train.py"
            elif outcome.difference is not None:
                yield self._differing(outcome)
        equal = [outcome for outcome in outcomes if not outcome.unknown and outcome.difference is None]
        if equal:
            tensors = sum(outcome.tensors for outcome in equal)
            names = ", ".join(dict.fromkeys(outcome.root for outcome in equal))
            without = f", nor were {self._twice.dropped} calls before them" if self._twice.dropped else ""
            what = (
                f"{RUNS} runs of the first step's forward and backward give equal bits: {names} ({tensors} outputs and "
                f"gradients). What is outside of these modules, such as data and optimizer, was not run again{without}"
            )
            yield OK, what, ""
        if not outcomes:
            what = (
                "nothing was run twice: no module that the program calls in eager code, or through torch.compile(model)"
            )
            yield NOTE, f"{what}, got a gradient", "dash-inductor verify train.py runs the whole program twice."

    def _differing(self, outcome: Outcome) -> Seen:
        assert outcome.difference is not None
        difference = outcome.difference
        what = f"runs of {outcome.root} from the same state differ: {difference.what}"
        if difference.operator:
            what += f". The operator {difference.operator}"
        else:
            what += ". It, or state that the program keeps outside of modules and that cannot be put back, is the cause"
        there = self.heard.at(difference.module)
        attentions = self.foreign.at(difference.module)
        if there or attentions:
            what += f". In that module ran {', '.join([*there, *attentions])}"
        advice = (
            "Make it deterministic: set the flag before the first step, give attention deterministic=True, or replace "
            "the operator. What a module draws must come from torch's generators."
        )
        return WARNING, what, advice
