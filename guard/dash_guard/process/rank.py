"""The guard in the process of one rank: counts steps, and passes the events of training to the checks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dash_inductor.errors import described
from dash_inductor.observers import active, hooks
from dash_inductor.observers.observer import Observer

from ..checks.check import Check
from ..checks.state import State
from ..errors import FaultConfirmedError
from ..observation.step_numbers import StepNumbers
from ..report.coverage import Coverage
from ..transport.channel import Channel
from ..transport.messages import Message
from ..upstream.parallel import has_uneven_inputs
from .group import NOT_ALL, Group
from .lonely import Lonely
from .own_optimizers import OwnOptimizers
from .work import Work

log = logging.getLogger("dash_guard")


class Rank(Observer):
    """The observer of training in one rank: passes events to checks, and keeps their errors away from the training.

    A training step ends with the first forward after every optimizer of the previous training step has run, or when an
    optimizer is about to run for the second time; so several optimizers may take turns. If an optimizer that has never
    run before is the first to run in a training step, it is counted into the previous one. A training step also ends
    when a gradient scaler skips its update. Optimizers of models that this rank trains by itself do not count.

    Args:
        number: the number of this rank.
        world: the number of ranks of the job.
        channel: the channel to the monitor.
        first_step: the number of the current step of training; see `observation.step_numbers`.

    Attributes:
        checks: the checks, in the order in which they get events.
        work: tells from another thread whether the training thread is making progress.
    """

    def __init__(self, number: int, world: int, channel: Channel, first_step: int | None = None) -> None:
        self.number, self.world, self.channel = number, world, channel
        self._numbers = StepNumbers(first_step)
        self.coverage, self.group = Coverage(), Group()
        self.checks: list[Check] = []
        self._stepped: set[int] = set()
        self._before: set[int] = set()  # optimizers that stepped in the step before
        self._known: set[int] = set()  # optimizers that have ever stepped
        self._own = OwnOptimizers()
        self._begun = self._met = False
        self._makers: dict[str, tuple[int, Callable[[], Check]]] = {}
        self._absent: list[str] = []  # checks that wait until all ranks have met
        self._first = 0  # the step from which they waited
        self._lonely, self._depth = Lonely(self.group), 0
        self.work = Work()

    @property
    def step(self) -> int:
        """The number of the current training step, from 1."""
        return self._numbers.number

    def add(self, make: Callable[[], Check]) -> None:
        """Add a check at the end of the list.

        Args:
            make: returns a new check. It is called again if ranks can connect only at a later step.
        """
        check = make()
        self._makers[check.name] = len(self._makers), make
        self.checks.append(check)

    def start(self, instead: Observer | None = None) -> None:
        """Begin to receive events.

        Args:
            instead: the observer that has received them up to now. This one takes its place in the list of observers,
                so that every event goes to exactly one of the two. None: there was no such observer.
        """
        hooks.install()
        observers = active.observers
        others = [each for each in observers if each is not instead]
        place = next((number for number, each in enumerate(observers) if each is instead), len(others))
        observers[:] = [*others[:place], self, *others[place:]]

    def close(self) -> None:
        """Stop receiving events, end all checks, and send the coverage to the monitor."""
        if self in active.observers:
            active.observers.remove(self)
            self._finish_step()
            self._lonely.close()
            for name in self._absent:
                self.coverage.unseen(name, f"off, because ranks cannot agree: {NOT_ALL}")
            for check in self.checks:
                self._safely(check, check.close)
            self.group.close()
            self.channel.send(Message("coverage", self.number, self.step, self.coverage.news()))
            self.channel.close()

    def module_begins(self, module: nn.Module) -> None:
        """Tell the checks that a module's forward begins; after an optimizer step, this first begins a new step."""
        if self._stepped >= self._before:
            self._finish_step()
        if has_uneven_inputs(module):
            self._go_alone("a model trains with uneven inputs, so that ranks make different numbers of steps")
        self._begin()
        if self._depth == 0 and torch.is_grad_enabled():
            self._lonely.forward_begins()
        self._depth += 1
        self.work.trains()
        self._lonely.event()
        self._show(lambda check: check.module_begins(module))

    def module_ended(self, module: nn.Module, result: Any) -> None:
        """Tell the checks that a module's forward has ended."""
        self._depth = max(0, self._depth - 1)
        self._lonely.event()
        self._show(lambda check: check.module_ended(module, result))

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Tell the checks that an optimizer is about to step; if checks need it, all ranks are connected first."""
        if self._own.has(optimizer, State.of(self)):
            self.coverage.unseen("bits", "steps of optimizers of models that no other rank is declared to train")
            return
        if id(optimizer) in self._stepped:
            self._finish_step()
        elif id(optimizer) not in self._known and self._known and not self._stepped and self._numbers.number > 1:
            self._numbers.retreat()  # it takes turns with those of the step before
            self._stepped = set(self._before)
        self._known.add(id(optimizer))
        self._lonely.updates()
        self._numbers.see(optimizer)
        self._begin()
        self._meet()
        self._show(lambda check: check.before_optimizer(optimizer))

    def after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Tell the checks that an optimizer has stepped."""
        if self._own.has(optimizer, State.of(self)):
            return
        self._stepped.add(id(optimizer))
        self._lonely.step_done()
        self._show(lambda check: check.after_optimizer(optimizer))

    def scaler_updated(self) -> None:
        """Tell the checks that a gradient scaler was updated; if no optimizer has stepped, the step was skipped."""
        self._show(lambda check: check.scaler_updated())
        if not self._stepped and self._begun:
            self._lonely.step_done()
            self._numbers.advance()
            self._begun = False

    def _begin(self) -> None:
        """Begin a step at its first event."""
        if not self._begun:
            self._begun = True
            self._join()
            self._show(lambda check: check.step_began(self.step))

    def run_together(self, check: Check, call: Callable[[], None]) -> bool:
        """Call a function of a check at a point that all ranks reach; first connect the ranks if they are unconnected.

        Returns:
            Whether the check is still enabled; an error in the call switches it off.
        """
        self._meet()
        if check in self.checks:
            self._safely(check, call)
        return check in self.checks

    def _meet(self) -> None:
        """Connect all ranks once, if any check needs it; if they cannot connect, these checks are switched off.

        If not all ranks come, these checks wait until all have: training goes on, and ranks try again at later steps.
        """
        together = [check for check in self.checks if check.together]
        if self._met:
            return
        if not together and not self._absent:
            self._met = True
            return
        if not self._absent:
            self.group.settings = f"{self.group.settings} {[check.name for check in together]}"
        why = self.group.open(self.step)
        self._met = why is not None
        if why is None:
            self._wait_for_others(together)
        elif why:
            self._go_alone(why)
        elif self.world > 1:
            self._lonely.start()

    def _wait_for_others(self, together: Sequence[Check]) -> None:
        if not together:
            return
        if any(check.name not in self._makers for check in together):
            self._go_alone(NOT_ALL)
            return
        self._absent, self._first = [check.name for check in together], self.step
        self.checks[:] = [check for check in self.checks if not check.together]
        for check in together:
            self._safely(check, check.close)
        log.warning(
            "checks of the guard (%s) wait until all ranks have a guard; training goes on", ", ".join(self._absent)
        )

    def _join(self) -> None:
        """At the beginning of a step: let the checks begin that have waited until all ranks were there."""
        if not self._absent or not self._met:
            return
        for name in self._absent:
            place, make = self._makers[name]
            self.coverage.unseen(name, "before all ranks had a guard", self.step - self._first)
            try:
                check = make()
            except Exception as error:  # others must not wait for this rank
                self.group.end(f"the check {name} could not begin: {described(error)}")
                self.coverage.unseen(name, f"could not begin: {described(error)}")
                continue
            later = (i for i, each in enumerate(self.checks) if self._makers[each.name][0] > place)
            self.checks.insert(next(later, len(self.checks)), check)
        self._absent = []

    def _go_alone(self, why: str) -> None:
        """Switch off all checks that need other ranks, and leave the group, so that no rank waits for this one."""
        together = [check for check in self.checks if check.together]
        if not together and not self._absent:
            return
        self.group.end(why)
        self._met = True
        for name in self._absent:
            self.coverage.unseen(name, f"off, because ranks cannot agree: {why}")
        names, self._absent = [*self._absent, *(check.name for check in together)], []
        self.checks[:] = [check for check in self.checks if not check.together]
        for check in together:
            self._safely(check, check.close)
            self.coverage.unseen(check.name, f"off, because ranks cannot agree: {why}")
        log.warning("checks of the guard are off (%s): %s", ", ".join(names), why)

    def _finish_step(self) -> None:
        if not self._stepped:
            return
        self._show(lambda check: check.step_done(self.step))
        self._depth = 0
        self._before, self._stepped = self._stepped, set()
        self._numbers.advance()
        self._begun = False
        for message in self.channel.orders():
            self._show(
                lambda check, message=message: check.order(message),  # type: ignore[misc]
                [check for check in self.checks if check.name == message.kind],
            )

    def _show(self, event: Callable[[Check], None], checks: Sequence[Check] | None = None) -> None:
        for check in tuple(self.checks if checks is None else checks):
            self._safely(check, functools.partial(event, check))

    def _safely(self, check: Check, call: Callable[[], None]) -> None:
        try:
            call()
        except FaultConfirmedError:
            raise
        except Exception as error:  # a check never ends the training: it ends itself
            why = f"switched off in step {self.step}: {described(error)}"
            if check in self.checks:
                self.checks.remove(check)
                if check.together:  # others must not wait for this rank
                    self.group.end(f"the check {check.name} was {why}")
            self.coverage.unseen(check.name, why)
            log.warning("the check %s of the guard is off: %s", check.name, why)
