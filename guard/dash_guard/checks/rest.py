"""State at rest: what nobody may change between two uses is compared with itself, on the device.

Lanes of parameters and optimizer state are taken behind the optimizer's step.  Parameters and buffers are hashed again
when the next step begins, parameters and optimizer state before the optimizer uses them again.  The flags of what has
changed are copied out, and nobody waits for them.  A change that PyTorch knows of, by a tensor's version, is a write of
the program: the monitor asks whether every rank made it.

Gradients rest from the end of the last backward to the optimizer, unless the program writes them meanwhile, for example
because it clips them.  Which backward is the last one is known from the step before.  Scalers of losses write them past
PyTorch's versions: then gradients are not looked at.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dash_inductor.errors import described
from dash_inductor.observers import active, phases

from ..recompute.backwards import Backwards
from .check import Check, Host
from .digests import Arriving, Queue
from .state import KNOWN, Entry, Hashed, State, known_lanes

TESTED = 100
"""Steps between two tests of the hash itself."""

GRADIENTS = "gradients"
"""What a message says of the moment at which gradients are compared."""

NAMED = 6
"""Names of tensors in a message at most."""

_LENGTH = 100  # characters of a name in a message


class Rest(Check):
    """Compares state at rest.

    Args:
        rank: of which this is a check.
        rest: n: between every n-th step and the next one; 0: never.
    """

    name = "rest"

    def __init__(self, rank: Host, rest: int = 1, **settings: Any) -> None:
        super().__init__(rank)
        self._state, self._every = State.of(rank), rest
        self._queue = Queue()
        self._after: dict[int, list[Hashed]] = {}  # by optimizer
        self._alive: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._buffers: list[Hashed] = []
        self._frozen: list[Hashed] = []
        self._to_test = 1
        self._update = 0  # the step whose update the state at rest was hashed behind
        self._backwards = Backwards(self._backward_ended, self._no_gradients)
        self._count = 0  # backwards that have ended in this step
        self._last: set[int] = set()  # the number of those before which optimizers have stepped in the step before
        self._stepped: set[int] = set()  # the same of this step
        self._scaled = False
        self._gradients: dict[int, tuple[int, list[Hashed]]] = {}  # by optimizer, with that number

    def step_began(self, step: int) -> None:
        """Nothing of this step has used parameters or buffers yet."""
        self._count = 0
        self._gradients.clear()
        parameters = {number: _of(parts, phases.PARAMETER) for number, parts in self._after.items()}
        resting = [part for parts in parameters.values() for part in parts]
        now = self._compare(step, "begin", [*resting, *self._buffers, *self._frozen])
        for number, parts in self._after.items():
            entries = {id(entry) for part in parameters[number] for entry in part.entries}
            self._after[number] = _of(parts, phases.OPTIMIZER_STATE) + _picked(now, entries)
        self._frozen = _picked(now, {id(entry) for part in self._frozen for entry in part.entries})
        self._buffers = []
        self._queue.poll()

    def module_begins(self, module: nn.Module) -> None:
        """A model has begun, whose buffers and frozen parameters rest too."""
        self._state.module_begins(module)
        self._backwards.module_begins()

    def module_ended(self, module: nn.Module, result: Any) -> None:
        """The forward of a module has ended."""
        self._backwards.module_ended(result)

    def _backward_ended(self) -> None:
        """If it is the last one before an optimizer steps, hash gradients."""
        if not active.is_on(self.rank):
            return
        self._count += 1
        on = self._every > 0 and self.rank.step % self._every == 0 and not self._scaled
        if on and self._count in self._last:
            for number, alive in self._alive.items():
                if (optimizer := alive()) is not None:
                    parts = self._state.hash(self.name, self._state.gradients(optimizer))
                    self._gradients[number] = self._count, parts

    def scaler_updated(self) -> None:
        """A scaler of losses has unscaled gradients."""
        if not self._scaled:
            self.rank.coverage.unseen(self.name, "gradients, because a scaler of losses writes them")
        self._scaled = True

    def _no_gradients(self, error: Exception) -> None:
        self._gradients.clear()
        self.rank.coverage.unseen(self.name, f"gradients: {described(error)}")

    def step_done(self, step: int) -> None:
        """Now and then, hash what is known, where state lies."""
        self._last, self._stepped = self._stepped, set()
        devices = {part.lanes.device for parts in self._after.values() for part in parts}
        if step < self._to_test or not devices:
            return
        self._to_test = step + TESTED
        arriving = [Arriving(known_lanes(device)) for device in devices]
        self._queue.put(arriving, functools.partial(self._hashed, step, arriving))

    def _hashed(self, step: int, arriving: Sequence[Arriving]) -> None:
        wrong = [numbers for numbers in arriving if numbers.numbers().tolist() != [list(lanes) for lanes in KNOWN]]
        self.rank.coverage.count(self.name, hashes_tested=len(arriving))
        if wrong:
            self.send(step, when="hash")

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to use its parameters and its state."""
        self._queue.poll()
        self._stepped.add(self._count)
        count, gradients = self._gradients.pop(id(optimizer), (self._count, []))
        if count == self._count:
            self._compare(self.rank.step, GRADIENTS, gradients)
        else:
            self.rank.coverage.unseen(self.name, "gradients, because a step has more backwards than the one before")
        self._compare(self.rank.step, "update", self._after.pop(id(optimizer), []))

    def after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Parameters and state rest from now on, and buffers until the next forward."""
        self._alive[id(optimizer)] = weakref.ref(optimizer)
        if not self._every or self.rank.step % self._every:
            return
        self._after[id(optimizer)] = self._state.after(optimizer)
        self._update = self.rank.step
        for number in [number for number, alive in self._alive.items() if alive() is None]:
            self._after.pop(number, None)
            del self._alive[number]
        self._buffers = self._state.hash(self.name, self._state.buffers())
        frozen = self._state.frozen([alive for each in self._alive.values() if (alive := each()) is not None])
        if sum(len(part.entries) for part in self._frozen) != len(frozen):
            self._frozen = self._state.hash(self.name, frozen)

    def close(self) -> None:
        """Compare what still rests; waits for the device."""
        parts = [part for hashed in self._after.values() for part in hashed]
        self._compare(self.rank.step, "end", [*parts, *self._buffers, *self._frozen])
        self._queue.poll(wait=True)

    def _compare(self, step: int, when: str, parts: Sequence[Hashed]) -> list[Hashed]:
        """Hash again what parts hold, and begin to copy out what has changed; what was hashed."""
        if not any(part.entries for part in parts):
            return []
        now = self._state.hash(self.name, [entry for part in parts for entry in part.entries])
        place = {id(entry): (hashed, row) for hashed in now for row, entry in enumerate(hashed.entries)}
        arriving: list[Arriving] = []
        compared: list[list[Entry]] = []
        written: list[Entry] = []
        for part in parts:
            pairs: dict[int, tuple[Hashed, list[int], list[int]]] = {}
            for row, entry in enumerate(part.entries):
                hashed, there = place.get(id(entry), (None, 0))
                if hashed is None:  # freed or replaced: nobody uses it
                    self.rank.coverage.unseen(self.name, "tensors that are not there any more")
                    continue
                if hashed.marks[there] != part.marks[row]:
                    written.append(entry)
                    continue
                _, before, after = pairs.setdefault(id(hashed), (hashed, [], []))
                before.append(row)
                after.append(there)
            for hashed, before, after in pairs.values():
                arriving.append(Arriving((_rows(part.lanes, before) != _rows(hashed.lanes, after)).any(1)))
                compared.append([part.entries[row] for row in before])
        then = functools.partial(self._arrived, step, when, self._update, compared, arriving, written)
        self._queue.put(arriving, then)
        return now

    def _arrived(
        self,
        step: int,
        when: str,
        update: int,
        compared: Sequence[Sequence[Entry]],
        arriving: Sequence[Arriving],
        written: Sequence[Entry],
    ) -> None:
        changed = [
            entries[row]
            for entries, numbers in zip(compared, arriving, strict=True)
            for row in numbers.numbers().nonzero()[0].tolist()
        ]
        count = sum(map(len, compared))
        if when == GRADIENTS:
            self.rank.coverage.count(self.name, gradients=count)
            if written:
                self.rank.coverage.unseen(self.name, "gradients that the program wrote meanwhile", len(written))
            if changed:
                self.send(step, when=when, tensors=count, changed=_told(changed), changes=len(changed))
            return
        self.rank.coverage.count(self.name, comparisons=1, tensors=count)
        if written:
            self.rank.coverage.unseen(self.name, "tensors that the program wrote meanwhile", len(written))
        self.send(
            step,
            when=when,
            tensors=count,
            **({"changed": _told(changed), "changes": len(changed), "since": update} if changed else {}),
            **({"written": _told(written), "writes": len(written)} if written else {}),
        )


def _told(entries: Sequence[Entry]) -> list[list[str]]:
    return [[entry.stage, entry.name[:_LENGTH]] for entry in entries[:NAMED]]


def _rows(lanes: Tensor, rows: list[int]) -> Tensor:
    """Some rows, without a transfer where they are one range."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return lanes[rows[0] : rows[0] + len(rows)]
    numbers = torch.tensor(rows)
    return lanes[numbers.pin_memory().to(lanes.device, non_blocking=True) if lanes.is_cuda else numbers]


def _of(parts: Sequence[Hashed], stage: str) -> list[Hashed]:
    """The entries of a stage."""
    return _picked(parts, {id(entry) for part in parts for entry in part.entries if entry.stage == stage})


def _picked(parts: Sequence[Hashed], entries: set[int]) -> list[Hashed]:
    """The parts with those entries alone that have these ids."""
    found = []
    for part in parts:
        rows = [row for row, entry in enumerate(part.entries) if id(entry) in entries]
        if rows:
            picked = Hashed([part.entries[row] for row in rows], [part.descriptions[row] for row in rows])
            picked.marks, picked.lanes = [part.marks[row] for row in rows], _rows(part.lanes, rows)
            found.append(picked)
    return found
