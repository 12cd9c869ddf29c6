"""Finds collectives that have given ranks different results, or one rank two results for the same input.

All members of an `all_reduce` must have the same result: a minority is accused. Where two runs with the same input
differ, the finding names the collective and its group, and a rank only if that rank alone has seen it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..report.findings import Finding
from ..shared.class_names import members
from ..shared.votes import groups, minority
from ..transport.messages import Message
from .detector import Detector, Job
from .promises import PARTED, parts
from .wording import ranks as ranks_in_words

PATIENCE = 30.0
"""Seconds after which the detector no longer waits for messages about a step."""

_REMEMBERED = 256
_FINDINGS = 64
_LENGTH = 120  # characters of a digest or a label
_REDUCES, _SCATTERS = "all_reduce", "reduce_scatter"


@dataclass
class _Step:
    """What members have reported about a collective in a step: a digest of all results, and what differed in a second
    run.
    """

    since: float
    reported: dict[int, tuple[str, str]] = field(default_factory=dict)


class CollectiveChecksums(Detector):
    """A detector that compares the digests of reductions that ranks have sent."""

    kinds = frozenset({"collective_checksums"})

    def __init__(self, job: Job, **settings: Any) -> None:
        super().__init__(job)
        self._steps: dict[tuple[int, str], _Step] = {}
        self._done: dict[tuple[int, str], None] = {}
        self._members: dict[str, tuple[tuple[int, ...], frozenset[int]]] = {}
        self._findings, self._parted = 0, False

    def take(self, message: Message, now: float) -> None:
        """Take a rank's digests of the results of its reductions."""
        checksums = None if self._parted else message.body.get("checksums")
        for where, steps in checksums.items() if isinstance(checksums, dict) else ():
            if not isinstance(steps, dict) or message.rank not in self._of(where)[1]:
                continue
            for text, reported in steps.items():
                if not (text.isdecimal() and len(text) < 16 and isinstance(reported, list) and len(reported) == 2):
                    continue
                key = int(text), where
                if key not in self._done and all(isinstance(part, str) and len(part) <= _LENGTH for part in reported):
                    self._steps.setdefault(key, _Step(now)).reported[message.rank] = reported[0], reported[1]

    def observe(self, finding: Finding, now: float) -> None:
        """Stop comparing if a finding says that ranks no longer count the same steps."""
        if parts(finding) and not self._parted:
            self._parted = True
            self._steps.clear()
            self.job.coverage.unseen("collective_checksums", PARTED)

    def detect(self, now: float) -> list[Finding]:
        """Return findings about the steps whose digests have arrived from all ranks of a group, or are late."""
        return self._detect(now, last=False)

    def finish(self, now: float) -> list[Finding]:
        """Return findings about all remaining steps; no more digests will arrive."""
        return self._detect(now, last=True)

    def _of(self, where: str) -> tuple[tuple[int, ...], frozenset[int]]:
        """The members that the name of a collective means; none if the name is invalid."""
        found = self._members.get(where)
        if found is None:
            kind, _, ranks = where.partition(" ")
            of = members(ranks, self.job.world) if kind in (_REDUCES, _SCATTERS) else None
            found = of or (), frozenset(of or ())
            if len(self._members) < 1 << 16:
                self._members[where] = found
        return found

    def _detect(self, now: float, last: bool) -> list[Finding]:
        found: list[Finding] = []
        for key in sorted(self._steps):
            step, everyone = self._steps[key], self._of(key[1])[0]
            if len(step.reported) < len(everyone):
                if not last and now - step.since <= PATIENCE:
                    continue
                self.job.coverage.unseen("collective_checksums", "results of some ranks of a group have not arrived")
            del self._steps[key]
            self._done[key] = None
            while len(self._done) > _REMEMBERED:
                del self._done[next(iter(self._done))]
            self.job.coverage.count("collective_checksums", compared=len(step.reported))
            if self._findings < _FINDINGS:
                new = [*self._different(key, step), *self._repeated(key, step)]
                self._findings += len(new)
                found += new
        return found

    def _different(self, key: tuple[int, str], step: _Step) -> list[Finding]:
        """Findings about members with different results of an `all_reduce`."""
        if not key[1].startswith(_REDUCES):
            return []
        sides = groups({rank: digest for rank, (digest, _) in step.reported.items() if digest})
        if len(sides) < 2:
            return []
        odd = minority(sides)
        whom = ranks_in_words(odd) if odd else " and ".join(map(ranks_in_words, sides[:4]))
        others = f"than {ranks_in_words(sides[0])}" if odd else "than each other"
        sentence = f"{whom} got a different result {others} from {_collective(key[1])}"
        return [self._finding(key, sentence, odd, sides, {"copies": len(step.reported), "agree": len(sides[0])})]

    def _repeated(self, key: tuple[int, str], step: _Step) -> list[Finding]:
        """Findings about two runs with the same input and different results."""
        seen = {rank: label for rank, (_, label) in step.reported.items() if label}
        if not seen:
            return []
        label = seen[min(seen)]
        where = f"{_collective(key[1])} gave two results for the same input ({label})"
        evidence = {"seen by": sorted(seen)[:16], "members": len(step.reported), "of": label}
        if key[1].startswith(_SCATTERS):  # each member has a part of its own, which comes from all of them
            sentence = (
                f"{where}, in the part of {ranks_in_words(sorted(seen))}: one rank of the group sent different data"
            )
            return [self._finding(key, sentence, (), (), evidence)]
        if 2 * len(seen) < len(step.reported) or (len(step.reported) == 2 and len(seen) == 1):
            accused = tuple(sorted(seen))
            return [self._finding(key, f"{where}, to {ranks_in_words(accused)} alone", accused, (), evidence)]
        return [self._finding(key, f"{where}: the data of one rank was changed on its way", (), (), evidence)]

    def _finding(
        self, key: tuple[int, str], sentence: str, ranks: tuple[int, ...], sides: Any, evidence: dict[str, Any]
    ) -> Finding:
        return Finding(
            "collective",
            "suspect",
            sentence,
            "Run nccl-tests among the hosts of this group, and look at the errors of their links.",
            ranks=ranks,
            step=key[0],
            stage="gradient",
            collective=_collective(key[1]),
            groups=tuple(sides),
            cause="network",
            evidence=evidence,
        )


def _collective(where: str) -> str:
    kind, _, ranks = where.partition(" ")
    return f"{kind} of {ranks}"
