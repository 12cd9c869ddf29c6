"""Checks during a recording that the ranks that DDP should keep equal have equal gradients and parameters.

All ranks of a process group gather the lanes (fingerprints) of their gradients and parameters, 16 bytes for each
tensor. Then every rank compares all lanes, on the writer thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from dash_inductor.errors import DashError
from dash_inductor.observers import phases
from dash_inductor.observers.observer import Observer, Seen

from ..fingerprints.arriving import Arriving
from ..fingerprints.lane_buffer import Ready
from ..fingerprints.sizes import LANES
from ..observation.exchange import Exchange
from ..recordings.agreement import find, sentence
from ..recordings.writer import File, Job, Writer

log = logging.getLogger("dash_guard")


GONE = -(1 << 63)
"""The lanes of a rank that can no longer hash, so that the others do not wait for it in vain."""


class ReplicasDiffer(DashError, RuntimeError):
    """Raised if ranks that must have equal gradients and parameters differ."""


class Replicas(Observer):
    """An observer that compares the tensors on which the ranks of each process group must agree.

    Args:
        found: "warn" logs the first difference, "raise" makes `check` raise it.
        writer: returns the writer of the recording, to whose file every difference is written.
    """

    def __init__(self, found: Literal["warn", "raise"], writer: Callable[[], Writer]) -> None:
        self._raises, self._reported, self._writer = found == "raise", "", writer
        self._groups = WeakTensorKeyDictionary()  # process groups by parameter
        self._taken: dict[dist.ProcessGroup, list[tuple[str, list[str], Tensor]]] = {}
        self._compared: list[threading.Event] = []  # set as soon as a job is done
        self._exchange = Exchange()

    def replicated(self, model: DistributedDataParallel) -> None:
        """From now on, compare the parameters of this DDP model and their gradients among its process group."""
        self.phases = frozenset({phases.GRADIENT, phases.PARAMETER})
        for name, parameter in model.module.named_parameters():
            if name not in model.parameters_to_ignore:
                self._groups[parameter] = model.process_group

    def seen(self, event: Seen) -> None:
        """Keep the lanes (128-bit hashes) of tensors that DDP ranks must hold equal, until the step ends.

        These are gradients or parameters. If this rank can no longer hash, keep the marker `GONE` in place of their
        lanes.
        """
        for group, names in self._split(event.parameters).items():
            if event.failed:
                device = event.parameters[0][1].device
                gone = torch.full((len(names), LANES), GONE, dtype=torch.int64, device=device)
                self._taken.setdefault(group, []).append((event.phase, names, gone))
            else:
                self._keep(group, names, event)

    def step_ended(self, step: int) -> None:
        """Exchange the hashes of the step among ranks; the writer thread compares them."""
        taken, self._taken = self._taken, {}
        for group, parts in taken.items():
            everyone = self._exchange.gather(torch.cat([lanes for *_, lanes in parts]), group)
            labels = [(phase, name) for phase, names, _ in parts for name in names]
            ranks = dist.get_process_group_ranks(group)
            self._writer().put(self._job(step, ranks, labels, Arriving(everyone.flatten(1)).rows))

    def _split(self, parameters: Sequence[tuple[str, Tensor]]) -> dict[dist.ProcessGroup, list[str]]:
        """The names of those parameters that ranks must agree on, by process group."""
        groups: dict[dist.ProcessGroup, list[str]] = {}
        for name, parameter in parameters:
            group = self._groups.get(parameter)
            if group is not None and dist.get_world_size(group) > 1:
                groups.setdefault(group, []).append(name)
        return groups

    def _keep(self, group: dist.ProcessGroup, names: list[str], event: Seen) -> None:
        """Keep the lanes of these names; missing ones count as zeros, so that all ranks send equally many."""
        parts = [(seen, lanes) for seen, lanes in event.lanes if not set(names).isdisjoint(seen)]
        if not parts:
            return
        if len(parts) == 1 and parts[0][0] == names:
            kept = parts[0][1]
        else:
            kept = parts[0][1].new_zeros(len(names), LANES)
            for seen, lanes in parts:
                rows = {name: row for row, name in enumerate(seen)}
                pairs = [(place, rows[name]) for place, name in enumerate(names) if name in rows]
                places, sources = torch.tensor(pairs, device=lanes.device).unbind(1)
                kept[places] = lanes[sources]
        self._taken.setdefault(group, []).append((event.phase, names, kept))

    def check(self) -> None:
        """With "raise", wait until all exchanged lanes have been compared; otherwise do nothing.

        All ranks have compared the same lanes and call this at the same places, so that either all of them raise or
        none does.

        Raises:
            ReplicasDiffer: ranks differed; raised once.
        """
        if not self._raises:
            return
        while self._compared:
            self._compared[0].wait()
            self._compared.pop(0)
        text, self._reported = self._reported, ""
        if text:
            self._raises = False
            raise ReplicasDiffer(text)

    def close(self) -> None:
        """Wait until no process group holds a tensor that was exchanged."""
        self._exchange.close()

    def _job(self, step: int, ranks: list[int], labels: list[tuple[str, str]], ready: Ready) -> Job:
        done = threading.Event()
        if self._raises:
            self._compared.append(done)

        def job(file: File) -> None:
            try:
                present = {rank: row for rank, row in zip(ranks, ready(), strict=True) if GONE not in row}
                finding = find(list(present), labels, list(present.values())) if present else None
                if finding is None:
                    return
                if not self._reported:
                    self._reported = f"step {step}: {sentence(finding)}"
                    if not self._raises and dist.get_rank() == min(present):
                        log.warning("%s", self._reported)
                file.json({"type": "finding", "step": step, **finding})
            finally:
                done.set()

        return job
