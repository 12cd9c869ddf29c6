"""Finds ranks that have computed different bits when they ran a step again."""

from __future__ import annotations

from typing import Any

from ..report.findings import Finding
from ..transport.messages import Message
from .cross_rank_recompute import COMPARE, WAIT, is_sound_pair, not_repeated
from .detector import Detector, Job
from .wording import explained
from .wording import ranks as listed_ranks

_REMEMBERED = 256  # steps
TRANSIENT = "One such fault is no proof of a defect; look at this machine's ECC counters, and watch whether it repeats."


class SameRankRecomputeDetector(Detector):
    """A detector of ranks whose second run of a step differs; a rank whose second run is equal sends no message.

    Where several ranks differ at the same place, something that they share has changed between the two runs, such as
    parameters that one rank owns and all ranks gather. Then a finding about state at rest or a collective says on which
    rank it changed.
    """

    kinds = frozenset({"same_rank_recompute"})

    def __init__(self, job: Job, **settings: Any) -> None:
        super().__init__(job, **settings)
        self._found: list[Finding] = []
        self._off = self._finished = False
        self._alike: dict[int, tuple[float, list[Message]]] = {}  # by step, of ranks that differ in the same place
        self._accused: dict[int, set[int]] = {}  # by step

    def take(self, message: Message, now: float) -> None:
        """Store a rank's message that its second run of a step differs from the first."""
        body = message.body
        if not all(
            isinstance(body.get(name, ""), str) for name in ("off", "phase", "tensor", "once", "again", "third")
        ):
            return
        if body.get("off"):
            if not self._off and is_sound_pair(body.get("unrepeated", [])):
                reason = f"step {message.step} computes something else on most ranks when it is run again"
                fields = {"step": message.step, "stage": body.get("phase", ""), "tensor": body.get("tensor", "")}
                self._found.append(not_repeated(reason, body, fields))
            self._off = True
        elif body.get("phase") and not self._off:
            alike = body.get("alike", 1)
            if type(alike) is int and alike > 1:
                self._alike.setdefault(message.step, (now, []))[1].append(message)
            else:
                self._found.append(_finding(message, body, self.job))

    def observe(self, finding: Finding, now: float) -> None:
        """Note ranks that a finding about state at rest or a collective accuses, which explains shared differences."""
        if finding.kind in ("at_rest", "collective") and finding.severity != "note" and finding.step is not None:
            self._accused.setdefault(finding.step, set()).update(finding.ranks)
            while len(self._accused) > _REMEMBERED:
                del self._accused[min(self._accused)]

    def detect(self, now: float) -> list[Finding]:
        """Return new findings about ranks whose second run of a step differs."""
        return self._detect(now, wait=not self._finished)

    def finish(self, now: float) -> list[Finding]:
        """Return the last findings, except those about differences that several ranks share.

        These wait for the next `detect`, when other detectors have returned their last findings.
        """
        self._finished = True
        return self._detect(now, wait=True)

    def _detect(self, now: float, wait: bool) -> list[Finding]:
        found, self._found = self._found, []
        for step, (since, messages) in sorted(self._alike.items()):
            accused = self._accused.get(step)
            if accused is None and wait and (self._finished or now - since < WAIT):
                continue
            del self._alike[step]
            if accused is None:
                found.append(_shared(step, messages))
                continue
            self.job.coverage.unseen("same_rank_recompute", "ranks that share a change with another rank")
            found += [_finding(message, message.body, self.job) for message in messages if message.rank in accused]
        return found


def _shared(step: int, messages: list[Message]) -> Finding:
    ranks, body = sorted({message.rank for message in messages}), messages[0].body
    sentence = (
        f"{listed_ranks(ranks)} compute {body['phase']} {body['tensor']} differently when they run the step again: "
        "something that they share has changed in between, and nothing says on which rank"
    )
    return Finding(
        "same_rank_recompute",
        "note",
        sentence,
        step=step,
        stage=body["phase"],
        tensor=body["tensor"],
        groups=(tuple(ranks),),
    )


def _finding(message: Message, body: dict[str, Any], job: Job) -> Finding:
    rank, what = message.rank, f"{body['phase']} {body['tensor']}"
    why = explained((rank,), job)
    if body.get("third") == body["again"]:
        meaning = "two repetitions agree with each other and differ from the step: a fault that struck once"
    elif body.get("third") == body["once"]:
        meaning = "one of three runs differs: a fault that struck once, in the repetition"
    else:
        meaning = "three runs differ: " + ("what they compute is unstable" if why else "this machine is unstable")
    return Finding(
        "same_rank_recompute",
        "suspect",
        f"rank {rank} computes {what} differently when it runs the step again; {meaning}{why and '; '}{why}",
        COMPARE if why else TRANSIENT,
        (rank,),
        message.step,
        body["phase"],
        body["tensor"],
        cause="unknown" if why or body.get("compiled") else "machine",
        evidence={"micro-batch": body.get("call"), "repeated": body.get("third") == body["again"]},
    )
