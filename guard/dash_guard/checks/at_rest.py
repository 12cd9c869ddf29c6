"""The at-rest checksum: compares, on the device, hashes of state before and after a time in which nobody may change it.

Parameters and optimizer state are hashed after the optimizer has stepped. Parameters and buffers are hashed again when
the next step begins, parameters and optimizer state again before the optimizer uses them. A flag for each tensor, which
says whether it has changed, is copied to the host without waiting. If PyTorch knows of a change, because the version of
the tensor differs, the program has written it: the monitor asks whether every rank has.

A program can also write past the versions, such as by ``.data``. Only a single bit that has changed is the mark of a
failing memory; it is told from the hashes as long as the tensor has not changed again. Parameters that are what they
were when the optimizer uses them, and something else in between, were exchanged by the program: an evaluation does so.

Gradients are at rest from the end of the last backward to the optimizer, unless the program writes them in between, for
example to clip them. Which backward is the last one is known from the step before. Gradient scalers write gradients
without changing their versions, so gradients are not compared under them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dash_inductor.errors import described
from dash_inductor.observers import active, phases

from ..fingerprints.fingerprint import bytes_of
from ..fingerprints.one_bit import has_flipped
from ..fingerprints.sizes import LANES
from ..recompute.backwards import Backwards
from .check import Check, Host
from .digests import Arriving, Queue
from .state import KNOWN, Entry, Hashed, State, known_lanes, local, picked, rows_of

TESTED = 100
"""The number of steps between two tests of the hash itself."""

GRADIENTS = "gradients"
"""The moment of a message about gradients."""

NAMED = 6
"""The largest number of names of tensors in a message."""

_LENGTH = 100  # characters of a name in a message


class AtRest(Check):
    """A check that compares hashes of training state from before and after a time in which nothing may write it.

    Args:
        rank: the rank that this check belongs to.
        at_rest: n: compare between every n-th step and the next one; 0: never.
    """

    name = "at_rest"

    def __init__(self, rank: Host, at_rest: int = 1, **settings: Any) -> None:
        super().__init__(rank)
        self._state, self._every = State.of(rank), at_rest
        self._queue = Queue()
        self._after: dict[int, list[Hashed]] = {}  # by optimizer
        self._updated: dict[int, list[Hashed]] = {}  # its parameters as it has left them
        self._touched: dict[int, Entry] = {}  # parameters that have changed or were written since, by id of the entry
        self._alive: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._untrained: set[int] = set()  # ids of tensors of models that no optimizer updates
        self._written: set[int] = set()  # those of them that the program writes itself
        self._buffers: list[Hashed] = []
        self._frozen: list[Hashed] = []
        self._to_test = 1
        self._update = 0  # the step after whose update the state at rest was hashed
        self._backwards = Backwards(self._backward_ended, self._no_gradients)
        self._count = 0  # backwards that have ended in this step
        self._last: set[int] = set()  # after how many backwards optimizers stepped in the step before
        self._stepped: set[int] = set()  # the same of this step
        self._scaled = False
        self._gradients: dict[int, tuple[int, list[Hashed]]] = {}  # by optimizer, with that number

    def step_began(self, step: int) -> None:
        """Compare parameters and buffers, which nothing in this step has used yet, with their earlier hashes."""
        self._count = 0
        self._gradients.clear()
        parameters = {number: _of(parts, phases.PARAMETER) for number, parts in self._after.items()}
        self._updated = parameters
        self._touched = {}
        at_rest = [part for parts in parameters.values() for part in parts]
        now = self._compare(step, "begin", [*at_rest, *self._buffers, *self._frozen])
        for number, parts in self._after.items():
            entries = {id(entry) for part in parameters[number] for entry in part.entries}
            self._after[number] = _of(parts, phases.OPTIMIZER_STATE) + picked(now, entries)
        self._frozen = picked(now, {id(entry) for part in self._frozen for entry in part.entries})
        self._buffers = []
        self._queue.poll()

    def module_begins(self, module: nn.Module) -> None:
        """Register a model, whose buffers and frozen parameters are compared too."""
        self._state.module_begins(module)
        self._backwards.module_begins()

    def module_ended(self, module: nn.Module, result: Any) -> None:
        """Pass the end of a module's forward on to `Backwards`, which finds out when backwards end."""
        self._backwards.module_ended(result)

    def _backward_ended(self) -> None:
        """Hash gradients if this is the last backward before an optimizer steps."""
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
        """Called when a gradient scaler has unscaled gradients in place: from now on, gradients are not compared."""
        if not self._scaled:
            self.rank.coverage.unseen(self.name, "gradients, because a gradient scaler writes them")
        self._scaled = True

    def _no_gradients(self, error: Exception) -> None:
        self._gradients.clear()
        self.rank.coverage.unseen(self.name, f"gradients: {described(error)}")

    def step_done(self, step: int) -> None:
        """Test the hash every `TESTED` steps: on each device that holds state, hash tensors whose hashes are known."""
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
        """Compare the gradients, parameters and state that an optimizer is about to use with their earlier hashes."""
        self._queue.poll()
        self._stepped.add(self._count)
        count, gradients = self._gradients.pop(id(optimizer), (self._count, []))
        if count == self._count:
            self._compare(self.rank.step, GRADIENTS, gradients)
        else:
            self.rank.coverage.unseen(self.name, "gradients, because a step has more backwards than the one before")
        parts, updated = self._after.pop(id(optimizer), []), self._updated.pop(id(optimizer), [])
        self._compare(self.rank.step, "update", parts, updated)
        self._queue.poll()  # on the CPU, before the optimizer writes what has changed

    def after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Hash parameters, buffers and optimizer state after a step; nothing may write them before their next use."""
        self._alive[id(optimizer)] = weakref.ref(optimizer)
        if not self._every or self.rank.step % self._every:
            return
        self._after[id(optimizer)] = self._state.after(optimizer)
        self._update = self.rank.step
        for number in [number for number, alive in self._alive.items() if alive() is None]:
            self._after.pop(number, None)
            del self._alive[number]
        optimizers = [alive for each in self._alive.values() if (alive := each()) is not None]
        self._untrained = self._state.untrained(optimizers)
        self._buffers = self._state.hash(self.name, self._unwritten(self._state.buffers()))
        frozen = self._unwritten(self._state.frozen(optimizers))
        if sum(len(part.entries) for part in self._frozen) != len(frozen):
            self._frozen = self._state.hash(self.name, frozen)

    def _unwritten(self, entries: Sequence[Entry]) -> list[Entry]:
        return [entry for entry in entries if id(entry.tensor()) not in self._written]

    def _leave_to_the_program(self, changes: Sequence[_Change], written: Sequence[Entry]) -> None:
        """From now on, do not compare those tensors of models that no optimizer updates that the program writes."""
        more = [change.entry for change in changes] + list(written)
        own = {id(entry.tensor()) for entry in more if id(entry.tensor()) in self._untrained}
        if own:
            self._written |= own
            why = "tensors of models that no optimizer updates, which the program writes itself"
            self.rank.coverage.unseen(self.name, why, len(own))

    def close(self) -> None:
        """Compare the state that is still at rest with its earlier hashes; waits for the device."""
        parts = [part for hashed in self._after.values() for part in hashed]
        updated = [part for hashed in self._updated.values() for part in hashed]
        self._compare(self.rank.step, "end", [*parts, *self._buffers, *self._frozen], updated)
        self._queue.poll(wait=True)

    def _compare(self, step: int, when: str, parts: Sequence[Hashed], updated: Sequence[Hashed] = ()) -> list[Hashed]:
        """Hash entries again and start to copy the old and the new hashes to the host.

        Args:
            step: the training step.
            when: the moment of the message.
            parts: the entries with their last hashes.
            updated: some of these entries with the hashes that they had after the update.

        Returns:
            The new hashes.
        """
        if not any(part.entries for part in parts):
            return []
        now = self._state.hash(self.name, [entry for part in parts for entry in part.entries])
        place = {id(entry): (hashed, row) for hashed in now for row, entry in enumerate(hashed.entries)}
        pairs, written = _Pairs(), []
        for part in parts:
            gone = sum(id(entry) not in place for entry in part.entries)
            if gone:  # freed or replaced: nothing uses them
                self.rank.coverage.unseen(self.name, "tensors that were freed or replaced", gone)
            written += pairs.add(part, place, by_version=True)
        exchanged = _Pairs()  # what parameters are now, beside what they were after the update
        for part in updated:
            exchanged.add(part, place, by_version=False)
        then = functools.partial(self._arrived, step, when, self._update, pairs, written, exchanged, self._touched)
        self._queue.put([*pairs.arriving, *exchanged.arriving], then)
        return now

    def _arrived(
        self,
        step: int,
        when: str,
        update: int,
        pairs: _Pairs,
        written: Sequence[Entry],
        exchanged: _Pairs,
        touched: dict[int, Entry],
    ) -> None:
        changes = list(pairs.changes())
        if when == "begin":
            own = [change for change in changes if id(change.entry.tensor()) in self._untrained]
            self._leave_to_the_program([change for change in own if not change.is_one_bit()], written)
            changes = [change for change in changes if id(change.entry.tensor()) not in self._written]
            written = self._unwritten(written)
        changed = [change.entry for change in changes]
        count = sum(map(len, pairs.entries))
        body: dict[str, Any] = {"changed": _reported(changed), "changes": len(changed)} if changed else {}
        if 0 < len(changed) <= NAMED and all(change.is_one_bit() for change in changes):
            body["one_bit"] = True
        if when == GRADIENTS:
            self.rank.coverage.count(self.name, gradients=count)
            if written:
                self.rank.coverage.unseen(self.name, "gradients that the program wrote in between", len(written))
            if changed:
                self.send(step, when=when, tensors=count, **body)
            return
        self.rank.coverage.count(self.name, comparisons=1, tensors=count)
        if written:
            self.rank.coverage.unseen(self.name, "tensors that the program wrote in between", len(written))
            body |= {"written": _reported(written), "writes": len(written)}
        if changed:
            body["since"] = update
        touched.update((id(entry), entry) for entry in (*changed, *written) if entry.stage == phases.PARAMETER)
        mine = {id(entry) for entries in exchanged.entries for entry in entries} & touched.keys()
        if mine and mine.isdisjoint(id(change.entry) for change in exchanged.changes()):
            body["restored"] = True
        self.send(step, when=when, tensors=count, **body)


@dataclass(frozen=True)
class _Change:
    """A tensor whose hash has changed, with its lanes before and after the change."""

    entry: Entry
    before: tuple[int, ...]
    after: tuple[int, ...]

    def is_one_bit(self) -> bool:
        """Whether the tensor is known to differ in one bit; waits for its device."""
        tensor = self.entry.tensor()
        return tensor is not None and bool(has_flipped(bytes_of(local(tensor)), self.before, self.after))


class _Pairs:
    """The lanes of tensors at two moments, side by side, on their way to the host.

    Attributes:
        entries: the tensors, by device.
        arriving: for each list of them, their lanes before and after, int64 [tensors, 4].
    """

    def __init__(self) -> None:
        self.entries: list[list[Entry]] = []
        self.arriving: list[Arriving] = []

    def add(self, part: Hashed, place: Mapping[int, tuple[Hashed, int]], by_version: bool) -> list[Entry]:
        """Add tensors with their lanes before, and those after, which `place` gives by the id of the entry.

        Returns:
            With `by_version`, the tensors that were left out, because their versions say that the program wrote them.
        """
        rows: dict[int, tuple[Hashed, list[int], list[int]]] = {}
        written = []
        for row, entry in enumerate(part.entries):
            hashed, there = place.get(id(entry), (None, 0))
            if hashed is None:
                continue
            if by_version and hashed.marks[there] != part.marks[row]:
                written.append(entry)
                continue
            _, before, after = rows.setdefault(id(hashed), (hashed, [], []))
            before.append(row)
            after.append(there)
        for hashed, before, after in rows.values():
            both = torch.cat((rows_of(part.lanes, before), rows_of(hashed.lanes, after)), 1)
            self.arriving.append(Arriving(both))
            self.entries.append([part.entries[row] for row in before])
        return written

    def changes(self) -> Iterator[_Change]:
        """The tensors whose lanes differ; waits for their copies."""
        for entries, numbers in zip(self.entries, self.arriving, strict=True):
            lanes = numbers.numbers()
            for row in (lanes[:, :LANES] != lanes[:, LANES:]).any(1).nonzero()[0].tolist():
                yield _Change(entries[row], tuple(lanes[row, :LANES].tolist()), tuple(lanes[row, LANES:].tolist()))


def _reported(entries: Sequence[Entry]) -> list[list[str]]:
    return [[entry.stage, entry.name[:_LENGTH]] for entry in entries[:NAMED]]


def _of(parts: Sequence[Hashed], stage: str) -> list[Hashed]:
    """The parts with the entries of a stage alone."""
    return picked(parts, {id(entry) for part in parts for entry in part.entries if entry.stage == stage})
