"""Turns lanes that were copied from devices into the frames of a step in the file, on the writer thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dash_inductor.observers import phases

from ..fingerprints.arriving import Arriving
from ..fingerprints.fingerprint import digest
from ..fingerprints.lane_buffer import Ready
from ..observation.labels import called
from ..observation.state import Value, arrived
from ..recordings.file import Name
from ..recordings.limits import NAMES_AT_ONCE
from ..recordings.writer import File
from .step_digests import StepDigests

Observed = tuple[Name, torch.device, int]
"""The name of a hashed tensor, its device, and the row of its lanes there."""

_NONE = object()
"""No value of state."""

_AFTER_GRAPHS = (phases.LOCAL_GRADIENT, phases.GRADIENT)


@dataclass(frozen=True)
class FromGraphs:
    """The fingerprints that CUDA graphs have appended to a journal.

    Attributes:
        names: name and description of each tensor; entries refer to them by index.
        ready: waits until the journal has been copied to the host, and returns it.
    """

    names: Sequence[tuple[str, str]]  # with descriptions
    ready: Ready


@dataclass
class StepWriter:
    """Writes the fingerprints of steps to a file; each tensor name is written once, and is a number from then on.

    Attributes:
        digests: gets the fingerprints of each step, too; None if nothing is logged.
    """

    digests: StepDigests | None = None
    _numbers: dict[Name, int] = field(default_factory=dict)
    _calls: dict[str, int] = field(default_factory=dict)  # of the present step
    _step: int = 0
    _state: dict[str, Any] = field(default_factory=dict)  # as the file has it

    def write_state(self, file: File, step: int, state: Mapping[str, Value]) -> None:
        """Write those values of the state of a step that have changed; waits for values on devices."""
        values = {name: arrived(value) for name, value in state.items()}
        changed = {name: value for name, value in values.items() if self._state.get(name, _NONE) != value}
        if changed:
            self._state.update(changed)
            file.json({"type": "state", "step": step, "values": changed})

    def write_loss(self, file: File, step: int, loss: Sequence[Arriving]) -> None:
        """Write the loss of a step, or of a part of it, of which each device has a part; waits for the devices."""
        if loss:
            value = sum(float(part.numbers()) for part in loss)
            file.json({"type": "loss", "step": step, "value": arrived(value)})

    def write(
        self,
        file: File,
        step: int,
        observed: Sequence[Observed],
        ready: Mapping[torch.device, Ready],
        from_graphs: Sequence[FromGraphs],
    ) -> None:
        """Wait for the hashes of a step, or of a part of it, and write its fingerprints.

        Args:
            file: the file.
            step: the number of the step.
            observed: the hashed tensors, in order.
            ready: for each device, a function that waits until its hashes are on the host and returns their rows.
            from_graphs: what CUDA graphs have hashed.
        """
        rows = {device: wait() for device, wait in ready.items()}
        entries = []
        for name, device, row in observed:
            low, high = rows[device][row]
            entries.append((name, digest(low, high, name.description)))
        # The order within a graph is unknown: gradients of attention come before those of parameters.
        place = next((n for n, (name, _) in enumerate(entries) if name.phase in _AFTER_GRAPHS), len(entries))
        if step != self._step:
            self._step = step
            self._calls.clear()
        entries[place:place] = [entry for journal in from_graphs for entry in self._read(file, step, journal)]
        if not entries:  # what graphs append to was empty
            return
        self._name(file, [name for name, _ in entries])
        file.step(step, [(self._numbers[name], value) for name, value in entries])
        if self.digests is not None:
            self.digests.add(step, entries)

    def end(self) -> None:
        """Log the digests of the last step."""
        if self.digests is not None:
            self.digests.end()

    def _read(self, file: File, step: int, journal: FromGraphs) -> list[tuple[Name, bytes]]:
        ((count, *numbers),) = journal.ready()
        if 3 * count > len(numbers):
            reason = f"in step {step}, CUDA graphs computed {count} of them, and {len(numbers) // 3} have room"
            file.json({"type": "unseen", "name": f"every {phases.ATTENTION_GRADIENT}", "reason": reason})
        entries = []
        for start in range(0, min(3 * count, len(numbers)), 3):
            number, low, high = numbers[start : start + 3]
            tensor, description = journal.names[number]
            calls = self._calls[tensor] = self._calls.get(tensor, 0) + 1
            name = Name(phases.ATTENTION_GRADIENT, called(tensor, calls), description)
            entries.append((name, digest(low, high, description)))
        return entries

    def _name(self, file: File, names: Sequence[Name]) -> None:
        new = [name for name in dict.fromkeys(names) if name not in self._numbers]
        for start in range(0, len(new), NAMES_AT_ONCE):
            part = new[start : start + NAMES_AT_ONCE]
            self._numbers.update({name: len(self._numbers) + n for n, name in enumerate(part)})
            file.json({"type": "names", "names": part})
