"""Which collective has given ranks different results, or one rank two results for the same input.

All members of an `all_reduce` must have the same result: a minority is accused.  Where two runs with the same input
differ, the collective and its group are named, and a rank only if it alone has seen it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..report.findings import Finding
from ..shared.class_names import members
from ..shared.votes import groups, minority
from ..transport.messages import Message
from .judge import Job, Judge
from .promises import PARTED, parts
from .wording import ranks as ranks_in_words

PATIENCE = 30.0
"""Seconds after which ranks that have said nothing of a step are not waited for."""

_REMEMBERED = 256
_FINDINGS = 64
_LENGTH = 120  # characters of a digest or a label
_REDUCES, _SCATTERS = "all_reduce", "reduce_scatter"


@dataclass
class _Step:
    """What members have told of a collective in a step: a digest of all results, and what differed when repeated."""

    since: float
    told: dict[int, tuple[str, str]] = field(default_factory=dict)


class Wires(Judge):
    """Compares results of reductions."""

    kinds = frozenset({"wires"})

    def __init__(self, job: Job, **settings: Any) -> None:
        super().__init__(job)
        self._steps: dict[tuple[int, str], _Step] = {}
        self._done: dict[tuple[int, str], None] = {}
        self._members: dict[str, tuple[tuple[int, ...], frozenset[int]]] = {}
        self._findings, self._parted = 0, False

    def take(self, message: Message, now: float) -> None:
        """What came out of the collectives of a rank."""
        wires = None if self._parted else message.body.get("wires")
        for where, steps in wires.items() if isinstance(wires, dict) else ():
            if not isinstance(steps, dict) or message.rank not in self._of(where)[1]:
                continue
            for text, told in steps.items():
                if not (text.isdecimal() and len(text) < 16 and isinstance(told, list) and len(told) == 2):
                    continue
                key = int(text), where
                if key not in self._done and all(isinstance(part, str) and len(part) <= _LENGTH for part in told):
                    self._steps.setdefault(key, _Step(now)).told[message.rank] = told[0], told[1]

    def heed(self, finding: Finding, now: float) -> None:
        """Ranks may have begun to count steps differently."""
        if parts(finding) and not self._parted:
            self._parted = True
            self._steps.clear()
            self.job.coverage.unseen("wires", PARTED)

    def judge(self, now: float) -> list[Finding]:
        """What is new."""
        return self._judged(now, last=False)

    def finish(self, now: float) -> list[Finding]:
        """What is new, when nobody will say more."""
        return self._judged(now, last=True)

    def _of(self, where: str) -> tuple[tuple[int, ...], frozenset[int]]:
        """The members that the name of a collective means; none if it is no such name."""
        found = self._members.get(where)
        if found is None:
            kind, _, ranks = where.partition(" ")
            of = members(ranks, self.job.world) if kind in (_REDUCES, _SCATTERS) else None
            found = of or (), frozenset(of or ())
            if len(self._members) < 1 << 16:
                self._members[where] = found
        return found

    def _judged(self, now: float, last: bool) -> list[Finding]:
        found: list[Finding] = []
        for key in sorted(self._steps):
            step, everyone = self._steps[key], self._of(key[1])[0]
            if len(step.told) < len(everyone):
                if not last and now - step.since <= PATIENCE:
                    continue
                self.job.coverage.unseen("wires", "results of all ranks of a group have not come")
            del self._steps[key]
            self._done[key] = None
            while len(self._done) > _REMEMBERED:
                del self._done[next(iter(self._done))]
            self.job.coverage.count("wires", compared=len(step.told))
            if self._findings < _FINDINGS:
                new = [*self._different(key, step), *self._repeated(key, step)]
                self._findings += len(new)
                found += new
        return found

    def _different(self, key: tuple[int, str], step: _Step) -> list[Finding]:
        """Members have different results of an `all_reduce`."""
        if not key[1].startswith(_REDUCES):
            return []
        sides = groups({rank: digest for rank, (digest, _) in step.told.items() if digest})
        if len(sides) < 2:
            return []
        odd = minority(sides)
        whom = ranks_in_words(odd) if odd else " and ".join(map(ranks_in_words, sides[:4]))
        rest = f"than {ranks_in_words(sides[0])}" if odd else "than each other"
        sentence = f"{whom} got another result {rest} from {_collective(key[1])}"
        return [self._finding(key, sentence, odd, sides, {"copies": len(step.told), "agree": len(sides[0])})]

    def _repeated(self, key: tuple[int, str], step: _Step) -> list[Finding]:
        """Two runs with the same input differ."""
        seen = {rank: label for rank, (_, label) in step.told.items() if label}
        if not seen:
            return []
        label = seen[min(seen)]
        where = f"{_collective(key[1])} gave two results for the same input ({label})"
        evidence = {"seen by": sorted(seen)[:16], "members": len(step.told), "of": label}
        if key[1].startswith(_SCATTERS):  # each member has a part of its own, which comes from all of them
            sentence = f"{where}, in the part of {ranks_in_words(sorted(seen))}: one of the group gave something else"
            return [self._finding(key, sentence, (), (), evidence)]
        if 2 * len(seen) < len(step.told) or (len(step.told) == 2 and len(seen) == 1):
            accused = tuple(sorted(seen))
            return [self._finding(key, f"{where}, to {ranks_in_words(accused)} alone", accused, (), evidence)]
        return [self._finding(key, f"{where}: what one of the group gave was changed on its way", (), (), evidence)]

    def _finding(
        self, key: tuple[int, str], sentence: str, ranks: tuple[int, ...], sides: Any, evidence: dict[str, Any]
    ) -> Finding:
        return Finding(
            "door",
            "suspect",
            sentence,
            "Run nccl-tests among the hosts of this group, and look at the errors of their links.",
            ranks=ranks,
            step=key[0],
            stage="gradient",
            collective=_collective(key[1]),
            groups=tuple(sides),
            cause="wire",
            evidence=evidence,
        )


def _collective(where: str) -> str:
    kind, _, ranks = where.partition(" ")
    return f"{kind} of {ranks}"
