"""Combines what all judges have found: two independent facts that accuse the same rank are a verdict.

| fact | how it was found |
|---|---|
| bits | replicas vote on what all of them must have |
| roll_call | all ranks vote on one rank's micro-batch |
| replay | a rank contradicts itself |
| rest | memory has changed while nothing wrote into it |
| door | what went into a collective is not what came out |
| hang | the others wait for it |
| dead, stopped | the state of its process |

Note [Independent facts]
Facts are independent if no single wrong digest, and no single earlier fact, explains both.  These are not:

* rest, and a difference of replicas in state behind an update, where rest compares with the digest of this same update:
  the state is hashed once for both.  One wrong hash differs from the replicas' and from what is there later.
* a difference in what optimizers are told, and anything else: what a program does, which explains what comes of it.
* a roll call in which the rank was given other values (its state is known to differ, or the program differs), and
  anything else: it is an effect.  A rank that contradicts itself is not meant.
* dead and stopped: the same look at the same process.

That replicas differ is a fact about two halves too; then the other one says which half is meant.

A suspicion about bits makes all ranks hold a roll call at once, which finds out whether it repeats.
"""

from __future__ import annotations

from typing import Any

from dash_inductor.observers import phases

from ..report.findings import Finding, Kind
from ..shared.roots import SETTING
from ..transport.messages import Message
from .judge import Job, Judge
from .rest import SINCE
from .roll_call import MACHINE, is_effect
from .wording import placed

_MEMORY = "Look at the ECC counters of this machine, and run dcgmi diag -r 3 there."
_OF_BITS: dict[Kind, str] = {
    "bits": "it differs from its replicas",
    "roll_call": "it computes another rank's micro-batch differently",
    "replay": "it contradicts itself",
    "rest": "its memory changed while nothing wrote into it",
    "door": "what it gave to a collective is not what came out",
}
_OF_LIFE: dict[Kind, str] = {
    "hang": "others wait for it",
    "dead": "its process has ended",
    "stopped": "its process is stopped",
}
_WINDOW = 100
"""Steps within which two facts about bits belong together."""


class Verdicts(Judge):
    """Stands behind all other judges.

    Args:
        job: gets orders.
        raises: whether a verdict on a machine ends training, see `checks.stop`.
    """

    kinds = frozenset({"roll_call"})

    def __init__(self, job: Job, raises: bool = False, **settings: Any) -> None:
        super().__init__(job, **settings)
        self._raises, self._stopped = raises, False
        self._facts: dict[int, list[Finding]] = {}
        self._judged: set[tuple[int, bool]] = set()
        self._new: list[Finding] = []
        self._ordered = 0
        self._open: dict[int, Finding] = {}  # by the number of the roll call that was ordered
        self._equal: set[int] = set()  # ranks that told of an ordered roll call without a difference

    def heed(self, finding: Finding, now: float) -> None:
        """Another fact."""
        if finding.severity == "verdict":
            self._judged.update((rank, finding.kind in _OF_BITS) for rank in finding.ranks)
            self._stop(finding)
            return
        facts = _OF_BITS if finding.kind in _OF_BITS else _OF_LIFE
        suspects = finding.ranks or tuple(rank for group in finding.groups for rank in group)
        if finding.severity != "suspect" or finding.kind not in facts or not suspects or is_effect(finding):
            return
        for rank in suspects:
            known = self._facts.setdefault(rank, [])
            known.append(finding)
            self._combine(rank, finding, facts)
        if finding.kind in ("bits", "replay", "door", "rest"):
            self._order(finding)

    def take(self, message: Message, now: float) -> None:
        """A roll call that was ordered is over: if all ranks are equal, the fault did not repeat."""
        if message.body.get("purpose") != "ordered" or not self._open:
            return
        if "first" in message.body:
            self._open.clear()
            self._equal.clear()
            return
        self._equal.add(message.rank)
        if len(self._equal) == self.job.world:
            for finding in self._open.values():
                who = placed(finding.ranks, self.job) if finding.ranks else "the ranks that differ"
                self._new.append(
                    Finding(
                        "roll_call",
                        "note",
                        f"all ranks compute one rank's micro-batch equally, so that what {who} "
                        f"had in step {finding.step} does not repeat: it struck once, in memory or on the wire",
                        ranks=finding.ranks,
                        step=message.step,
                        cause="unknown",
                    )
                )
            self._open.clear()
            self._equal.clear()

    def judge(self, now: float) -> list[Finding]:
        """What is new."""
        new, self._new = self._new, []
        return new

    def _combine(self, rank: int, latest: Finding, facts: dict[Kind, str]) -> None:
        if (rank, facts is _OF_BITS) in self._judged:
            return
        near = [each for each in self._facts[rank] if each.kind in facts and _near(each, latest)]
        kinds: dict[Kind, Finding] = {}
        for each in sorted(near, key=lambda each: not _accuses(each)):
            if each.kind not in kinds and all(independent(each, other) for other in kinds.values()):
                kinds[each.kind] = each
        if len(kinds) < 2 or not any(_accuses(each) for each in kinds.values()):
            return
        first = min(kinds.values(), key=lambda each: (each.step or 0, list(facts).index(each.kind)))
        others = [facts[kind] for kind in facts if kind in kinds]
        self._judged.add((rank, facts is _OF_BITS))
        what = f" in {first.stage} {first.tensor}".rstrip() if first.tensor else ""
        roll_call, rest = kinds.get("roll_call"), kinds.get("rest")
        operator = next((each.operator for each in kinds.values() if each.operator), "")
        evidence: dict[str, Any] = {kind: facts[kind] for kind in kinds}
        advice = first.advice
        if facts is _OF_BITS:
            advice = MACHINE if roll_call is not None else _MEMORY if rest is not None else first.advice or MACHINE
        verdict = Finding(
            first.kind,
            "verdict",
            f"{placed((rank,), self.job)} is wrong{what}, by {len(kinds)} independent facts: {'; '.join(others)}",
            advice,
            (rank,),
            first.step,
            first.stage,
            first.tensor,
            operator,
            first.collective,
            first.groups,
            "machine" if facts is _OF_BITS else first.cause,
            evidence,
        )
        self._new.append(verdict)

    def _order(self, finding: Finding) -> None:
        self._ordered += 1
        self._open[self._ordered] = finding
        everyone = tuple(range(self.job.world))
        self.job.orders.append((everyone, Message("roll_call", 0, finding.step or 0, {"number": self._ordered})))

    def _stop(self, finding: Finding) -> None:
        if self._raises and not self._stopped and finding.cause in ("machine", "wire") and finding.kind in _OF_BITS:
            self._stopped = True
            sentence = finding.sentence if finding.step is None else f"step {finding.step}: {finding.sentence}"
            everyone = tuple(range(self.job.world))
            self.job.orders.append((everyone, Message("stop", 0, finding.step or 0, {"sentence": sentence})))


def independent(a: Finding, b: Finding) -> bool:
    """Whether two facts of different kinds are independent, see Note [Independent facts]."""
    if {a.kind, b.kind} == {"dead", "stopped"}:
        return False
    if SETTING in (a.stage, b.stage):
        return False
    if {a.kind, b.kind} == {"rest", "bits"}:
        rest, bits = (a, b) if a.kind == "rest" else (b, a)
        behind_update = bits.stage in (phases.PARAMETER, phases.OPTIMIZER_STATE)
        return not behind_update or rest.evidence.get(SINCE) is None or rest.evidence[SINCE] != bits.step
    return True


def _near(a: Finding, b: Finding) -> bool:
    return a.step is None or b.step is None or abs(a.step - b.step) <= _WINDOW


def _accuses(finding: Finding) -> bool:
    """Whether a finding names whom it means, and not all who differ from each other; the latter only supports it."""
    everyone = {rank for group in finding.groups for rank in group}
    return bool(finding.ranks) and (len(finding.groups) < 2 or not everyone <= set(finding.ranks))
