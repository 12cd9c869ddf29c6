"""Combines what all detectors have found: two independent facts that accuse the same rank confirm a fault.

| fact | how it was found |
|---|---|
| bits | replicas vote on what all of them must hold |
| cross_rank_recompute | all ranks vote on one rank's micro-batch |
| same_rank_recompute | a rank contradicts itself |
| at_rest | memory has changed, and no operator wrote it |
| collective | the result of a collective does not match its inputs, or differs between ranks |
| hang | other ranks wait for it |
| dead, stopped | the state of its process |

Note [Independent facts]
Two facts are independent if no single wrong digest and no single earlier fact explains both. These are not independent:

* at_rest, and a difference of replicas after an update, if both use the digest of the same update: the state is hashed
  once for both. One wrong hash differs from the replicas' hashes and from the later hash of the same rank.
* a difference in optimizer settings, and any other fact: the program sets them, and they explain later differences.
* a cross-rank recompute in which the inputs of the rank differed (because its state or the program differs), and any
  other fact: it is an effect. A rank that contradicts itself is excepted.
* dead and stopped: both come from the same state of the same process.
* any two facts about bits of a rank on which something else differs (`Job.explanations`): that may explain both.

A tie between two halves of replicas is a fact about both; the other fact says which half is meant.

A suspicion about bits makes all ranks run a cross-rank recompute soon, which shows whether the fault repeats.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dash_inductor.observers import phases

from ..report.findings import Finding, Kind
from ..shared.roots import SETTING
from ..transport.messages import Message
from .at_rest import SINCE
from .cross_rank_recompute import COMPARE, is_effect
from .detector import Detector, Job
from .wording import explained, machine_advice, placed

_MEMORY = "Look at the ECC counters on {host}: nvidia-smi -q -d ECC, and run dcgmi diag -r 3 there."
_OF_BITS: dict[Kind, str] = {
    "bits": "it differs from its replicas",
    "cross_rank_recompute": "it computes another rank's micro-batch differently",
    "same_rank_recompute": "it contradicts itself",
    "at_rest": "its memory changed, and no operator wrote it",
    "collective": "a collective gave it a wrong result",
}
_OF_LIFE: dict[Kind, str] = {
    "hang": "other ranks wait for it",
    "dead": "its process has ended",
    "stopped": "its process is stopped",
}
_WINDOW = 100
"""The number of steps within which two facts about bits belong together."""


class Diagnosis(Detector):
    """A detector that combines the findings of all other detectors; it runs last.

    Args:
        job: the job, whose `orders` get requests to ranks.
        raises: whether a confirmed fault of a machine or the network is sent to all ranks, see `checks.stop`.
    """

    kinds = frozenset({"cross_rank_recompute"})

    def __init__(self, job: Job, raises: bool = False, **settings: Any) -> None:
        super().__init__(job, **settings)
        self._raises, self._stopped = raises, False
        self._facts: dict[int, list[Finding]] = {}
        self._confirmed: set[tuple[int, bool]] = set()
        self._new: list[Finding] = []
        self._ordered = 0
        self._open: dict[int, Finding] = {}  # by the number of the recompute that was requested
        self._equal: set[int] = set()  # ranks that reported a requested cross-rank recompute without a difference

    def observe(self, finding: Finding, now: float) -> None:
        """Add a finding to the facts about its ranks, and confirm a fault if it is independent of an earlier one."""
        if finding.severity == "confirmed":
            self._confirmed.update((rank, finding.kind in _OF_BITS) for rank in finding.ranks)
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
        if finding.kind in ("bits", "same_rank_recompute", "collective", "at_rest"):
            self._order(finding)

    def take(self, message: Message, now: float) -> None:
        """Take a rank's report about a requested recompute: if all ranks are equal, the fault did not repeat."""
        if message.body.get("purpose") != "ordered" or not self._open:
            return
        if "first" in message.body:
            self._open.clear()
            self._equal.clear()
            return
        self._equal.add(message.rank)  # it may report several calls of a step
        if len(self._equal) == self.job.world:
            for finding in self._open.values():
                who = placed(finding.ranks, self.job) if finding.ranks else "the ranks that differ"
                self._new.append(
                    Finding(
                        "cross_rank_recompute",
                        "note",
                        f"all ranks compute one rank's micro-batch equally: the fault of {who} "
                        f"in step {finding.step} does not repeat; it struck once, in memory or in the network",
                        ranks=finding.ranks,
                        step=message.step,
                        cause="unknown",
                    )
                )
            self._open.clear()
            self._equal.clear()

    def detect(self, now: float) -> list[Finding]:
        """Return the confirmed faults, and notes on faults that did not repeat, that are new since the last call."""
        new, self._new = self._new, []
        return new

    def _combine(self, rank: int, latest: Finding, facts: dict[Kind, str]) -> None:
        if (rank, facts is _OF_BITS) in self._confirmed or (facts is _OF_BITS and explained((rank,), self.job)):
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
        self._confirmed.add((rank, facts is _OF_BITS))
        what = f" in {first.stage} {first.tensor}".rstrip() if first.tensor else ""
        recompute, at_rest = kinds.get("cross_rank_recompute"), kinds.get("at_rest")
        operator = next((each.operator for each in kinds.values() if each.operator), "")
        evidence: dict[str, Any] = {kind: facts[kind] for kind in kinds}
        advice = first.advice
        if facts is _OF_BITS and not _is_the_machine(kinds.values()):
            advice = COMPARE
        elif facts is _OF_BITS:
            machine = machine_advice((rank,), self.job)
            memory = at_rest is not None and recompute is None
            advice = _MEMORY.format(host=self.job.hosts.get(rank) or "its host") if memory else machine
        confirmed = Finding(
            first.kind,
            "confirmed",
            f"{placed((rank,), self.job)} is wrong{what}, by {len(kinds)} independent facts: {'; '.join(others)}",
            advice,
            (rank,),
            first.step,
            first.stage,
            first.tensor,
            operator,
            first.collective,
            first.groups,
            first.cause if facts is not _OF_BITS else "machine" if _is_the_machine(kinds.values()) else "unknown",
            evidence,
        )
        self._new.append(confirmed)

    def _order(self, finding: Finding) -> None:
        self._ordered += 1
        self._open[self._ordered] = finding
        everyone = tuple(range(self.job.world))
        self.job.orders.append(
            (everyone, Message("cross_rank_recompute", 0, finding.step or 0, {"number": self._ordered}))
        )

    def _stop(self, finding: Finding) -> None:
        if self._raises and not self._stopped and finding.cause in ("machine", "network") and finding.kind in _OF_BITS:
            self._stopped = True
            sentence = finding.sentence if finding.step is None else f"step {finding.step}: {finding.sentence}"
            everyone = tuple(range(self.job.world))
            self.job.orders.append((everyone, Message("stop", 0, finding.step or 0, {"sentence": sentence})))


def independent(a: Finding, b: Finding) -> bool:
    """Whether two findings of different kinds are independent facts, see Note [Independent facts]."""
    if {a.kind, b.kind} == {"dead", "stopped"}:
        return False
    if SETTING in (a.stage, b.stage):
        return False
    if {a.kind, b.kind} == {"at_rest", "bits"}:
        at_rest, bits = (a, b) if a.kind == "at_rest" else (b, a)
        after_update = bits.stage in (phases.PARAMETER, phases.OPTIMIZER_STATE)
        return not after_update or at_rest.evidence.get(SINCE) is None or at_rest.evidence[SINCE] != bits.step
    return True


def _is_the_machine(findings: Iterable[Finding]) -> bool:
    """Whether facts about a rank accuse its machine: one does, or none leaves it open whether the program did it."""
    causes = [(finding.kind, finding.cause) for finding in findings]
    unseen = [(kind, "unknown") for kind in ("cross_rank_recompute", "same_rank_recompute", "at_rest", "collective")]
    return any(cause == "machine" for _, cause in causes) or not any(each in causes for each in unseen)


def _near(a: Finding, b: Finding) -> bool:
    return a.step is None or b.step is None or abs(a.step - b.step) <= _WINDOW


def _accuses(finding: Finding) -> bool:
    """Whether a finding accuses its ranks; a finding that names all ranks that differ from each other only supports
    others.
    """
    everyone = {rank for group in finding.groups for rank in group}
    return bool(finding.ranks) and (len(finding.groups) < 2 or not everyone <= set(finding.ranks))
