"""Finds data-parallel ranks that read the same data or draw the same noise, although each should have its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..observation.labels import GENERATOR
from ..report.findings import Finding
from ..shared.heartbeat import unpacked
from ..transport.messages import Message
from . import wording
from .detector import Detector, Job

STEPS = 3
"""The number of consecutive steps in which inputs must be equal, so that chance and padding cause no finding."""

_PATIENCE = 2.5
_KEPT = 64


@dataclass
class _Told:
    """What a rank has told of a step: digests of all inputs, of each tensor, and of each generator; its peers."""

    digest: str
    peers: tuple[int, ...]
    tensors: Mapping[str, str] = field(default_factory=dict)
    noise: Mapping[str, str] = field(default_factory=dict)


class SameData(Detector):
    """A detector that compares the digests of the inputs of all ranks.

    Ranks of a tensor- or context-parallel group share their inputs. So equal inputs are a finding only where the model
    says which ranks are data-parallel (DDP), or where some ranks share inputs and others do not. Inputs that do not
    change from step to step are a batch that is fixed on purpose, as for tests of speed: that is a note.

    Data-parallel ranks whose inputs differ may share one tensor of them. Tensors that change and are equal on some of
    the ranks are a finding; on all of them, a note, because a program may mean it so. Neither is a tensor that does not
    change, such as positions. It is also a note if such ranks have generators in equal states, and draw from them.
    """

    kinds = frozenset({"data", "joined"})

    def __init__(self, job: Job, **settings: Any) -> None:
        super().__init__(job, **settings)
        self._steps: dict[int, dict[int, _Told]] = {}
        self._since: dict[int, float] = {}
        self._runs: dict[tuple[int, ...], int] = {}
        self._first: dict[tuple[int, ...], str | None] = {}  # the digest at the start of a run; None once it changed
        self._reported: set[tuple[tuple[int, ...], bool]] = set()
        self._parts: dict[tuple[str, tuple[int, ...]], tuple[int, str]] = {}  # how often shared, and the last digest
        self._named: set[tuple[str, tuple[int, ...]]] = set()

    def take(self, message: Message, now: float) -> None:
        """Take a rank's digest of its inputs, or the notice that a rank has joined."""
        if message.kind == "joined":
            self._runs.clear()
            self._first.clear()
            self._parts.clear()
            return
        peers = tuple(int(rank) for rank in message.body["peers"])
        parts = [message.body.get(kind, {}) for kind in ("tensors", "noise")]
        told = _Told(str(message.body["digest"]), peers, *(dict(part) for part in parts))
        self._steps.setdefault(message.step, {})[message.rank] = told
        self._since.setdefault(message.step, now)
        if len(self._steps) > _KEPT:
            self._drop(min(self._steps))

    def detect(self, now: float) -> list[Finding]:
        """Return findings about ranks that have read the same data in the last `STEPS` steps."""
        found: list[Finding] = []
        for step in sorted(self._steps):
            if len(self._steps[step]) >= max(2, self.job.world) or now - self._since[step] > _PATIENCE:
                found += self._step(step, self._steps[step])
                self._drop(step)
        return found

    def finish(self, now: float) -> list[Finding]:
        """Return the last findings, without waiting for ranks whose digests are missing."""
        return self.detect(now + _PATIENCE + 1)

    def _drop(self, step: int) -> None:
        del self._steps[step], self._since[step]

    def _step(self, step: int, told: dict[int, _Told]) -> list[Finding]:
        by_digest: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for rank, each in told.items():
            by_digest.setdefault((each.digest, each.peers), []).append(rank)
        sets = [(peers, tuple(sorted(ranks))) for (_, peers), ranks in by_digest.items()]
        alike = len({len(ranks) for peers, ranks in sets if not peers}) == 1  # as tensor parallelism shares them
        shared = [ranks for peers, ranks in sets if len(ranks) > 1 and (peers or not alike)]
        self._runs = {ranks: self._runs.get(ranks, 0) + 1 for ranks in shared}
        now = {ranks: told[ranks[0]].digest for ranks in shared}
        self._first = {
            ranks: now[ranks] if self._first.get(ranks, now[ranks]) == now[ranks] else None for ranks in shared
        }
        found = []
        for ranks, times in self._runs.items():
            fixed = self._first[ranks] is not None
            if times >= STEPS and (ranks, fixed) not in self._reported:
                self._reported.add((ranks, fixed))
                found.append(_finding(ranks, step, times, fixed))
        return found + self._of_parts(step, told)

    def _of_parts(self, step: int, told: dict[int, _Told]) -> list[Finding]:
        """Findings about tensors and generators that data-parallel ranks share whose inputs differ."""
        before, self._parts = self._parts, {}
        found = []
        for (name, digest, peers), ranks in _shared(told).items():
            if len({told[rank].digest for rank in ranks}) < len(ranks):  # ranks that share all inputs
                continue
            times, last = before.get((name, ranks), (0, ""))
            times = times + 1 if digest != last else 0  # what does not change is no data, and nothing was drawn
            self._parts[name, ranks] = times, digest
            if times >= STEPS and (name, ranks) not in self._named:
                self._named.add((name, ranks))
                noise = name.startswith(GENERATOR)
                found.append(_of_noise(name, ranks, step) if noise else _of_tensor(name, ranks, step, peers))
        return found


def _shared(told: dict[int, _Told]) -> dict[tuple[str, str, tuple[int, ...]], tuple[int, ...]]:
    """The data-parallel ranks that share a tensor or the state of a generator, by name, digest and peers."""
    found: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    for rank, each in told.items():
        for name, digest in (*each.tensors.items(), *each.noise.items()):
            if each.peers:
                found.setdefault((name, digest, each.peers), []).append(rank)
    return {key: tuple(sorted(ranks)) for key, ranks in found.items() if len(ranks) > 1}


def _of_tensor(name: str, ranks: tuple[int, ...], step: int, peers: tuple[int, ...]) -> Finding:
    everyone = set(ranks) == set(unpacked(peers))
    return Finding(
        "data",
        "note" if everyone else "suspect",
        f"{wording.ranks(ranks)} read the same {name} in each of the last {STEPS} steps, and other inputs that differ",
        "Nothing, if it is meant so; else give each data-parallel rank its own part of this tensor, too",
        ranks=() if everyone else ranks,
        step=step,
        stage="input",
        cause="program",
        evidence={"steps": STEPS, "ranks": list(ranks), "tensor": name},
    )


def _of_noise(name: str, ranks: tuple[int, ...], step: int) -> Finding:
    return Finding(
        "data",
        "note",
        f"{wording.ranks(ranks)} draw the same random numbers from the {name} in each of the last {STEPS} steps, and "
        "read different data: dropout and noise are equal on them",
        "Nothing, if it is meant so; else seed it with the rank after the model is made, as by seed + rank",
        step=step,
        stage="input",
        cause="program",
        evidence={"steps": STEPS, "ranks": list(ranks), "generator": name},
    )


def _finding(ranks: tuple[int, ...], step: int, times: int, fixed: bool) -> Finding:
    same = f"{wording.ranks(ranks)} read the same inputs"
    return Finding(
        "data",
        "note" if fixed else "suspect",
        f"{same}, which have not changed in the last {times} steps"
        if fixed
        else f"{same}, in each of the last {times} steps",
        "Nothing, if the batch is fixed on purpose"
        if fixed
        else "Give each data-parallel rank its own part: DistributedSampler, or another seed",
        ranks=() if fixed else ranks,
        step=step,
        stage="input",
        cause="program",
        evidence={"steps": times, "ranks": list(ranks)},
    )
