"""Runs the forwards and backwards of the first step again from the same state, and compares the bits of their results.

For these inputs on this machine, this is a proof: bits that differ are not deterministic. Everything that the second
runs write in modules, gradients and random number generators is restored. What a forward writes elsewhere, such as to a
file or a list of the program, it writes again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dash_inductor.doctor import frames
from dash_inductor.doctor.findings import Seen, Severity
from dash_inductor.doctor.flag import Flag, kept
from dash_inductor.doctor.reading import foreign_modes
from dash_inductor.doctor.repeating import Repeating
from dash_inductor.errors import described
from dash_inductor.observers.hook import Hook
from dash_inductor.observers.names import Names, unwrapped
from dash_inductor.upstream.eager import in_backward, is_compiled, not_compiled

from ..checks.same_rank_recompute import differs
from ..recompute.execution import Digest
from ..recompute.micro_batch import results_of, why_failed
from ..recompute.operators import Operator, OperatorLog
from ..recompute.parameters import WroteParameters
from .again import Again, Inputs
from .before import Before, CannotRepeat, computes
from .difference import Difference, first_operator

OK, NOTE, WARNING, _ERROR = Severity

RUNS = 3
"""How often each call is made again; more runs make it less likely that a random order of additions stays unnoticed."""
TRIES = 3
"""The number of backwards to wait for if no call of the first one can be made again."""
MOST = 32
"""The largest number of calls of outermost modules that wait for their backward."""


@dataclass
class _Call:
    """A call of an outermost module: the state before it, and the gradients with which its backward began."""

    root: nn.Module
    before: Before | None = None
    cannot: str = ""
    gradients: dict[int, Tensor] = field(default_factory=dict)
    flag: Flag = Flag.OFF
    """The flag of the backward."""


@dataclass
class Outcome:
    """What running a call again has shown.

    Attributes:
        root: the class name of the outermost module.
        tensors: the number of compared tensors.
        difference: the first difference; None if there is none.
        unknown: why the call could not be run again; "" if it was.
    """

    root: str
    tensors: int = 0
    difference: Difference | None = None
    unknown: str = ""


class Repeat(Repeating):
    """Runs again the calls of outermost modules whose gradients the first backward of a program has computed.

    It is the entry point `repeat` of the group `dash_inductor.doctor`, see `dash_inductor.doctor.repeating`.

    Args:
        quiet: returns a context manager in which no other observer is active.

    Attributes:
        outcomes: the outcome of each call that was run again.
        dropped: the number of calls that were dropped before their backward came, since more than `MOST` were waiting.
    """

    def __init__(self, quiet: Callable[[], AbstractContextManager[None]]) -> None:
        self._quiet = quiet
        self._thread = threading.get_ident()
        self._depth = 0
        self._done = False
        self._tries = 0
        self._unknown: list[Outcome] = []  # of the first backwards, if none of their calls can be made again
        self._calls: list[_Call] = []
        self._copies: dict[tuple[int, int], Tensor] = {}
        self._handles: list[Any] = []
        self.outcomes: list[Outcome] = []
        self.dropped = 0

    def module_begins(self, module: nn.Module) -> None:
        """Save the state before a call of an outermost module that computes gradients."""
        if threading.get_ident() == self._thread:
            self._depth += 1
            if self._depth == 1 and torch.is_grad_enabled() and not in_backward() and not foreign_modes():
                self._begin(module)

    @not_compiled
    def _begin(self, module: nn.Module) -> None:
        if self._done:
            return
        given = frames.arguments(module)
        if given is not None and not computes(module, *given):
            return
        self._calls.append(call := _Call(module))
        if len(self._calls) > MOST:
            self._calls.pop(0)
            self.dropped += 1
        try:
            if given is None:
                raise CannotRepeat("its arguments are not seen")
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                raise CannotRepeat(f"it is one of {dist.get_world_size()} ranks: run one process to compare two runs")
            with self._quiet():
                call.before = Before.of(module, *given, self._copies)
        except CannotRepeat as error:
            call.cannot = str(error)
        except Exception as error:  # the call of the program must not raise
            call.cannot = described(error)
        self._handles.append(module.register_forward_hook(Hook(self._returned), with_kwargs=True))

    def module_ended(self, module: nn.Module, result: Any) -> None:
        """Count the end of a module's forward, to know which modules are outermost."""
        if threading.get_ident() == self._thread:
            self._depth = max(0, self._depth - 1)

    @not_compiled
    def _returned(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """The outermost module returns a result: wait for its gradient."""
        if self._done or self._depth or not self._calls or self._calls[-1].root is not module:
            return
        self._forget_hooks()
        call, results = self._calls[-1], results_of(result)
        if not results:
            self._calls.pop()  # no backward goes through it
        for number, tensor in results:
            tensor.register_hook(lambda gradient, number=number: _keep(call, number, gradient))

    def _forget_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @not_compiled
    def backward_ended(self) -> None:
        """Run again the calls whose gradients the backward has computed."""
        if self._done or self._depth or in_backward() or threading.get_ident() != self._thread or foreign_modes():
            return
        calls = [call for call in self._calls if call.gradients]
        if not calls:
            return
        self._tries += 1
        if self._tries < TRIES and all(call.before is None for call in calls):
            self._unknown, self._calls = [self._outcome(call) for call in calls], []
            return
        self._unknown.clear()
        self.end()
        self.outcomes += [self._outcome(call) for call in calls]

    def end(self) -> None:
        """Stop recording calls, and drop those whose backward has not come."""
        self.outcomes += self._unknown
        self._unknown, self._done = [], True
        self._forget_hooks()
        self._calls, self._copies = [], {}

    def shown(self, ran_in: Callable[[str], list[str]]) -> Iterator[Seen]:
        """Yields the findings about all calls, each as (severity, text, advice).

        Args:
            ran_in: returns the operators that are known to have run in a named module and may not be deterministic.
        """
        outcomes = self.outcomes
        for outcome in outcomes:
            if outcome.unknown:
                what = f"whether {outcome.root} computes the same bits twice is unknown: {outcome.unknown}"
                yield NOTE, what, "Run the program twice and compare: dash-guard verify train.py"
            elif outcome.difference is not None:
                yield _differing(outcome.root, outcome.difference, ran_in)
        equal = [outcome for outcome in outcomes if not outcome.unknown and outcome.difference is None]
        if equal:
            tensors = sum(outcome.tensors for outcome in equal)
            names = ", ".join(dict.fromkeys(outcome.root for outcome in equal))
            without = f", nor were {self.dropped} calls before them" if self.dropped else ""
            what = (
                f"{RUNS} runs of the first step's forward and backward give equal bits: {names} ({tensors} outputs and "
                f"gradients). What is outside of these modules, such as data and optimizer, was not run again{without}"
            )
            yield OK, what, ""
        if not outcomes:
            what = (
                "nothing was run twice: no module that the program calls in eager code, or through torch.compile(model)"
            )
            yield NOTE, f"{what}, got a gradient", "dash-guard verify train.py runs the whole program twice."

    def _outcome(self, call: _Call) -> Outcome:
        outcome = Outcome(type(unwrapped(call.root)).__name__)
        try:
            runs = [self._run(call) for _ in range(RUNS)]
            outcome.tensors = len(runs[0])
            for run in runs[1:]:
                if found := differs(runs[0], run) or differs(run, runs[0]):
                    outcome.difference = Difference.of(call.root, runs[0], found, self._operator(call))
                    break
        except CannotRepeat as error:
            outcome.unknown = str(error)
        except Exception as error:  # of the program, which runs again, or of what compares it
            outcome.unknown = why_failed(error)
        return outcome

    def _run(self, call: _Call, log: OperatorLog | None = None) -> list[Digest]:
        """Make a call again.

        Raises:
            CannotRepeat: it cannot be.
        """
        if call.before is None:
            raise CannotRepeat(call.cannot)
        before, batch = call.before, call.before.again()
        batch.gradients = dict(call.gradients)
        execution = Again(Names(), call.flag)
        hook = Inputs(execution)

        def around() -> AbstractContextManager[Any]:
            stack = ExitStack()
            stack.enter_context(before.put())
            if log is not None:
                log.module = execution.module
                stack.enter_context(log)
            return stack

        with self._quiet(), kept(), before.parameters.put():
            handle = call.root.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
            try:
                with contextlib.suppress(WroteParameters):  # `before.parameters` has all values
                    batch.run(execution, None, around)
            finally:
                handle.remove()
                digests = execution.end()
        if execution.failed:
            raise CannotRepeat(execution.failed)
        return digests

    def _operator(self, call: _Call) -> tuple[Operator, str] | None:
        """The first operator of eager code whose result differs, and how; None if none is found."""
        if is_compiled(call.root):
            return None
        logs = [OperatorLog() for _ in range(RUNS)]
        with contextlib.suppress(Exception):  # the log knows fewer kinds of tensors than programs have
            for log in logs:
                self._run(call, log)
            for log in logs[1:]:
                if found := first_operator(logs[0].operators, log.operators):
                    return found
        return None


def _differing(root: str, difference: Difference, ran_in: Callable[[str], list[str]]) -> Seen:
    what = f"runs of {root} from the same state differ: {difference.what}"
    if difference.operator:
        what += f". The operator {difference.operator}"
    else:
        what += ". It, or state that the program keeps outside of modules and that cannot be put back, is the cause"
    if there := ran_in(difference.module):
        what += f". In that module ran {', '.join(there)}"
    advice = (
        "Make it deterministic: set the flag before the first step, give attention deterministic=True, or replace "
        "the operator. What a module draws must come from torch's generators."
    )
    return WARNING, what, advice


def _keep(call: _Call, number: int, gradient: Tensor | None) -> None:
    """Note the gradient of a result; None where a graph gives several results, and this one gets no gradient."""
    if gradient is None:
        return
    if not call.gradients:
        call.flag = Flag.now()
    call.gradients.setdefault(number, gradient.detach().clone())
