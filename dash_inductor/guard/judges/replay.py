"""Judges steps that a rank has run again with other bits."""

from __future__ import annotations

from typing import Any

from ..findings import Finding
from ..judge import Job, Judge
from ..messages import Message
from .roll_call import DOCTOR

TRANSIENT = "One such fault is no proof of a defect; look at this machine's ECC counters, and watch whether it repeats."


class ReplayJudge(Judge):
    """Each message is a difference; equal repetitions send none."""

    kinds = frozenset({"replay"})

    def __init__(self, job: Job, **settings: Any) -> None:
        super().__init__(job, **settings)
        self._found: list[Finding] = []
        self._off = False

    def take(self, message: Message, now: float) -> None:
        """A rank has computed something else when it ran a step again."""
        body = message.body
        if not all(
            isinstance(body.get(name, ""), str) for name in ("off", "phase", "tensor", "once", "again", "third")
        ):
            return
        if body.get("off"):
            if not self._off:
                sentence = (
                    f"a step that is run again computes something else on most ranks, first in step {message.step}: "
                    "the program is not deterministic, or it cannot be run again"
                )
                self._found.append(
                    Finding("nondeterminism", "note", sentence, DOCTOR, step=message.step, cause="program")
                )
            self._off = True
        elif body.get("phase") and not self._off:
            self._found.append(_finding(message, body))

    def judge(self, now: float) -> list[Finding]:
        """What is new."""
        found, self._found = self._found, []
        return found


def _finding(message: Message, body: dict[str, Any]) -> Finding:
    rank, what = message.rank, f"{body['phase']} {body['tensor']}"
    if body.get("third") == body["again"]:
        meaning = "two repetitions agree with each other, and not with the step: a fault that struck once"
    elif body.get("third") == body["once"]:
        meaning = "one of three runs differs: a fault that struck once, in the repetition"
    else:
        meaning = "three runs differ: this machine is unstable"
    return Finding(
        "replay",
        "suspect",
        f"rank {rank} computes {what} differently when it runs the step again; {meaning}",
        TRANSIENT,
        (rank,),
        message.step,
        body["phase"],
        body["tensor"],
        cause="machine",
        evidence={"micro-batch": body.get("call"), "repeated": body.get("third") == body["again"]},
    )
