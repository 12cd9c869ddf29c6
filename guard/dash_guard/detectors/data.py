"""Finds data-parallel ranks that read the same data, although each should read its own part."""

from __future__ import annotations

from typing import Any

from ..report.findings import Finding
from ..transport.messages import Message
from . import wording
from .detector import Detector, Job

STEPS = 3
"""The number of consecutive steps in which inputs must be equal, so that chance and padding cause no finding."""

_PATIENCE = 2.5
_KEPT = 64


class SameData(Detector):
    """A detector that compares the digests of the inputs of all ranks.

    Ranks of a tensor- or context-parallel group share their inputs. So equal inputs are a finding only where the model
    says which ranks are data-parallel (DDP), or where some ranks share inputs and others do not. Inputs that do not
    change from step to step are a batch that is fixed on purpose, as for tests of speed: that is a note.
    """

    kinds = frozenset({"data", "joined"})

    def __init__(self, job: Job, **settings: Any) -> None:
        super().__init__(job, **settings)
        self._steps: dict[int, dict[int, tuple[str, tuple[int, ...]]]] = {}
        self._since: dict[int, float] = {}
        self._runs: dict[tuple[int, ...], int] = {}
        self._first: dict[tuple[int, ...], str | None] = {}  # the digest at the start of a run; None once it changed
        self._reported: set[tuple[tuple[int, ...], bool]] = set()

    def take(self, message: Message, now: float) -> None:
        """Take a rank's digest of its inputs, or the notice that a rank has joined."""
        if message.kind == "joined":
            self._runs.clear()
            self._first.clear()
            return
        peers = tuple(int(rank) for rank in message.body["peers"])
        self._steps.setdefault(message.step, {})[message.rank] = str(message.body["digest"]), peers
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

    def _step(self, step: int, digests: dict[int, tuple[str, tuple[int, ...]]]) -> list[Finding]:
        by_digest: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for rank, (digest, peers) in digests.items():
            by_digest.setdefault((digest, peers), []).append(rank)
        sets = [(peers, tuple(sorted(ranks))) for (_, peers), ranks in by_digest.items()]
        alike = len({len(ranks) for peers, ranks in sets if not peers}) == 1  # as tensor parallelism shares them
        shared = [ranks for peers, ranks in sets if len(ranks) > 1 and (peers or not alike)]
        self._runs = {ranks: self._runs.get(ranks, 0) + 1 for ranks in shared}
        now = {ranks: digests[ranks[0]][0] for ranks in shared}
        self._first = {
            ranks: now[ranks] if self._first.get(ranks, now[ranks]) == now[ranks] else None for ranks in shared
        }
        found = []
        for ranks, times in self._runs.items():
            fixed = self._first[ranks] is not None
            if times >= STEPS and (ranks, fixed) not in self._reported:
                self._reported.add((ranks, fixed))
                found.append(_finding(ranks, step, times, fixed))
        return found


def _finding(ranks: tuple[int, ...], step: int, times: int, fixed: bool) -> Finding:
    same = f"{wording.ranks(ranks)} read the same inputs"
    return Finding(
        "data",
        "note" if fixed else "suspect",
        f"{same}, which have not changed in the last {times} steps"
        if fixed
        else f"{same}, in each of the last {times} steps",
        "nothing, if the batch is fixed on purpose"
        if fixed
        else "give each data-parallel rank its own part: DistributedSampler, or another seed",
        ranks=() if fixed else ranks,
        step=step,
        stage="input",
        cause="program",
        evidence={"steps": times, "ranks": list(ranks)},
    )
