"""Compares, by digests, what several ranks must hold bit for bit.

These are reduced gradients, parameters (frozen or not), optimizer state, broadcast buffers and optimizer settings.
Ranks share the settings even where they shard everything else. Copies of parameters that the program keeps itself, such
as averaged weights, are found in some of the first steps (`kept_state`).

Each step sends one root digest per stage (kind of tensor) and class of ranks (the ranks that must be equal), for the
last four steps at most, in less than 1 KB. The monitor asks for the digests below a root if roots differ. The monitor
learns classes that a program does not declare from short digests of the undeclared tensors in the first steps.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dash_inductor.errors import described
from dash_inductor.observers.names import inner

from ..shared.class_names import LEARNED, LENGTH, members, spelled
from ..shared.roots import FROZEN, SETTING, STAGES, VALUE
from ..transport.messages import Message
from .check import Check, Host
from .classes import broadcast_buffers
from .digests import Arriving, Labels, Leaves, Queue, Ring, short
from .frozen import Frozen
from .hyperparameters import Hyperparameters
from .kept_state import SEARCHES, KeptState
from .state import Entry, Hashed, State

SENT = 4
"""The largest number of last steps whose roots a message contains."""

ROOTS = 36
"""The largest number of roots in a message with more than one step, which keeps it below 1 KB."""

CLASSES = 6
"""The largest number of classes of a rank."""

LEARNING = 24
"""The largest number of steps in which digests of undeclared tensors are sent; most classes are learned earlier."""

COPIES_EVERY = 8
"""How often copies of parameters are compared that the program keeps itself, once their classes are learned."""

_UNDECLARED = 600  # tensors of a stage whose classes are learned
_PAGE = 200  # names of a message


class Replicas(Check):
    """A check that hashes the tensors that several ranks hold, and sends root digests.

    Args:
        rank: the rank that this check belongs to.
        every: n: compare every n-th step; 0: never.

    Attributes:
        kept: what was hashed since the last call of `taken`, for `stop.Stop`; None if nobody calls it.
    """

    name = "bits"

    def __init__(self, rank: Host, every: int = 1, **settings: Any) -> None:
        super().__init__(rank)
        self._state, self._every = State.of(rank), every
        self._hyperparameters, self._queue = Hyperparameters(self._state), Queue()
        self._parts: list[Hashed] = []  # of the present step
        self.kept: list[Hashed] | None = None
        self._ring = Ring()
        self._labels: dict[Any, Labels] = {}
        self._broadcast: nn.Module | None = None
        self._learned: dict[tuple[str, str], str] = {}  # class by stage and name
        self._names: dict[str, dict[str, None]] = {}  # names whose values the monitor gets, by stage
        self._pages: dict[tuple[str, int], list[str]] = {}  # names that the monitor has
        self._learning = LEARNING
        self._copies, self._looks_for_copies = KeptState(), True
        self._frozen = Frozen(self._state, self.name)

    def step_began(self, step: int) -> None:
        """Discard what a skipped step has left, and send the root digests whose copies from the device have arrived."""
        self._parts = []
        self._state.reductions.clear()
        self._queue.poll()

    def module_begins(self, module: nn.Module) -> None:
        """Hash the buffers of a DDP model, which are broadcast before its inner module begins."""
        self._state.module_begins(module)
        replica, ranks = broadcast_buffers(self._broadcast) if self._broadcast is not None else (None, ())
        if replica is not None and inner(replica) is module and self._on():
            ignored = {self._state.names.of_buffer(replica.module, name) for name in replica.parameters_to_ignore}
            buffers = (entry for entry in self._state.buffers(replica.module) if entry.name not in ignored)
            entries = [replace(entry, ranks=ranks) for entry in buffers]
            self._keep(self._state.hash(self.name, entries))
        self._broadcast = module if broadcast_buffers(module)[0] is not None else None

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Hash the gradients, which have been reduced by now."""
        self._queue.poll()
        self._state.before_optimizer(optimizer)
        if self._on():
            wanted = [entry for entry in self._state.gradients(optimizer) if self._class_of(entry)]
            self._keep(self._state.hash(self.name, wanted))

    def after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Hash the new parameters, the optimizer state, and the optimizer's settings."""
        if self._on():
            self._keep(self._state.after(optimizer) + self._hyperparameters.of(self.name, optimizer))

    def step_done(self, step: int) -> None:
        """Queue the root digests of the step; they are sent once the hashes have been copied to the host."""
        if self._parts:
            self._keep_copies(step)
            self._parts += self._frozen.hashes()  # not in `kept`: a program may write them otherwise on each rank
        parts, self._parts = self._parts, []
        if parts:
            arriving = [Arriving(part.lanes) for part in parts]
            described = [(part.entries, part.descriptions) for part in parts]
            self._queue.put(arriving, functools.partial(self._arrived, step, described, arriving))
            self._learning -= 1
        self._queue.poll()

    def _keep_copies(self, step: int) -> None:
        """Hash the copies of parameters that the program keeps, and look for them in some steps."""
        if not self._looks_for_copies:
            return
        try:
            if self._copies.settle():
                self._learning = max(self._learning, LEARNING)
            if step in SEARCHES:
                self._copies.search(*self._state.searched())
            if self._learning > 0 or step % COPIES_EVERY == 0:
                wanted = [entry for entry in self._copies.entries() if self._class_of(entry)]
                self._keep(self._state.hash(self.name, wanted))
        except Exception as error:  # an object of the program that is more than it seems
            self._looks_for_copies = False
            self.rank.coverage.unseen(self.name, f"copies of parameters that the program keeps: {described(error)}")

    def order(self, message: Message) -> None:
        """Answer the monitor's request for the digests below a root, or take over classes of ranks it has learned."""
        body = message.body
        if "classes" in body:
            self._learn(str(body.get("stage")), body["classes"])
            return
        step, of, stage, path = (body.get(key) for key in ("step", "class", "stage", "path"))
        leaves = self._ring.get(step, (of, stage)) if isinstance(step, int) else None
        below = None if leaves is None or not isinstance(path, str) else leaves.below(path)
        self.send(self.rank.step, of=step, stage=stage, path=path, below=below, **{"class": of})

    def close(self) -> None:
        """Send the digests of a step that `Stop` has cut short, and wait until all digests have been sent."""
        self.step_done(self.rank.step)
        self._queue.poll(wait=True)

    def taken(self) -> list[Hashed]:
        """The tensors hashed since the last call, with their hashes; forgets them."""
        kept, self.kept = self.kept or [], []
        return kept

    def _keep(self, parts: list[Hashed]) -> None:
        self._parts += parts
        if self.kept is not None:
            self.kept += parts

    def _on(self) -> bool:
        return self._every > 0 and self.rank.world > 1 and self.rank.step % self._every == 0

    def _learn(self, stage: str, classes: Any) -> None:
        for name, tensors in classes.items() if isinstance(classes, dict) else ():
            ranks = members(str(name), self.rank.world)
            if ranks and self.rank.number in ranks and isinstance(tensors, list):
                self._learned.update(((stage, str(tensor)), str(name)) for tensor in tensors)

    def _class_of(self, entry: Entry) -> str:
        """The class of an entry; LEARNED alone while it is unknown; "" if the entry has none."""
        if len(entry.ranks) > 1:
            return _spelled(entry.ranks)
        if entry.ranks or self.rank.world < 2 or entry.stage == SETTING:
            return ""
        return self._learned.get((entry.stage, entry.name)) or (LEARNED if self._learning > 0 else "")

    def _arrived(self, step: int, parts: list[tuple[list[Entry], list[str]]], arriving: Sequence[Arriving]) -> None:
        kept = self._ring.of(step)
        if kept:  # the roots have been sent: the step's number is that of a step that other optimizers have made
            self.rank.coverage.unseen(self.name, "the first step of an optimizer that takes turns with others")
            return
        found: dict[tuple[str, str], dict[str, tuple[str, bytes]]] = {}
        again: set[tuple[str, str]] = set()
        for (entries, descriptions), numbers in zip(parts, arriving, strict=True):
            lanes = numbers.numbers().tobytes()
            for row, (entry, description) in enumerate(zip(entries, descriptions, strict=True)):
                of = self._class_of(entry)
                if of and len(of) <= LENGTH:
                    table = found.setdefault((of, entry.stage), {})
                    if entry.name in table:
                        again.add((of, entry.stage))
                    table[entry.name] = description, lanes[16 * row : 16 * row + 16]
                else:
                    why = "no other rank is declared to have it" if not of else "its list of ranks is too long"
                    self.rank.coverage.unseen(self.name, f"{entry.stage}: {why}")
        for (of, stage), table in found.items():
            # Optimizers divide parameters among ranks, each in its own order; frozen ones are in the order of writes.
            if (of, stage) in again or stage == FROZEN:
                table = dict(sorted(table.items()))
            described_, lanes_ = zip(*table.values(), strict=True)
            leaves = Leaves(self._label((of, stage), Labels(tuple(table), described_)), b"".join(lanes_))
            if of == LEARNED:
                self._teach(step, stage, leaves)
            else:
                kept[of, stage] = leaves
        count = sum(len(leaves.labels.names) for leaves in kept.values() if isinstance(leaves, Leaves))
        self.rank.coverage.count(self.name, steps=1, tensors=count)
        self._roots(step)

    def _label(self, key: tuple[str, str], labels: Labels) -> Labels:
        """The labels, or the equal ones of the step before, so that they are kept once."""
        if self._labels.get(key) != labels:
            self._labels[key] = labels
        return self._labels[key]

    def _roots(self, step: int) -> None:
        """Send the roots of the last steps, by class and step, one for each of `STAGES`."""
        kept = self._ring.of(step)
        for (of, stage), leaves in list(kept.items()):
            if not isinstance(leaves, str):
                kept.setdefault(("root", of, stage), leaves.root())
        classes = sorted({key[0] for key in kept if key[0] != "root"})
        for of in classes[CLASSES:]:
            self.rank.coverage.unseen(self.name, f"class {of}: {CLASSES} others are compared")
        body: dict[str, dict[str, list[str]]] = {}
        count = sum(key[0] == "root" for key in kept)
        steps = min(SENT, max(1, ROOTS // max(1, count)))
        for of in classes[:CLASSES]:
            for number in range(max(1, step - (steps - 1) * self._every), step + 1, self._every):
                roots = [self._ring.get(number, ("root", of, stage)) or "" for stage in STAGES]
                if any(roots):
                    body.setdefault(of, {})[str(number)] = roots
        more = {"frozen_writes": self._frozen.written} if self._frozen.written else {}
        self.send(step, roots=body, **more)

    def _teach(self, step: int, stage: str, leaves: Leaves) -> None:
        """Send short digests of tensors without a class, and each name once."""
        names = list(leaves.labels.names[:_UNDECLARED])
        if len(leaves.labels.names) > _UNDECLARED:
            self.rank.coverage.unseen(self.name, f"{stage}: undeclared tensors beyond {_UNDECLARED}")
        rows = {name: leaves.lanes[16 * row : 16 * row + 16] for row, name in enumerate(names)}
        self._names.setdefault(stage, {}).update(dict.fromkeys(names))
        names_sent = list(self._names[stage])
        for start in range(0, len(names_sent), _PAGE):
            page = names_sent[start : start + _PAGE]
            values = "".join(short(rows[name])[: 2 * VALUE] if name in rows else "-" * 2 * VALUE for name in page)
            new = {} if self._pages.get((stage, start)) == page else {"names": page}
            self._pages[stage, start] = page
            self.send(step, stage=stage, first=start, values=values, **new)


@functools.lru_cache(maxsize=256)
def _spelled(ranks: tuple[int, ...]) -> str:
    return spelled(ranks)
