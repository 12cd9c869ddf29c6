"""Finds ranks whose state changed between two uses, while nothing should write it.

A change on one rank accuses that rank; a change on most ranks comes from the program. Only a single bit accuses its
machine: a program may write past PyTorch's version counters on some ranks, as in an evaluation on rank 0 with other
weights, which it puts back before they are trained again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dash_inductor.observers import phases

from ..report.findings import Finding
from ..transport.messages import Message
from .detector import Detector, Job
from .wording import named
from .wording import ranks as ranks_in_words

PATIENCE = 3.0
"""Seconds after which the detector no longer waits for messages about a step."""

RECURRENT = 3
"""The number of steps in which a rank finds the same tensor changed by more than a bit until it counts as written by
the program.
"""

SINCE = "compared with the update of step"
"""The key in the evidence for the step whose update digest differed later; None for any other digest."""

_FINDINGS = 32  # of a rank and kind at most
_WHEN = {
    "begin": "between two steps",
    "gradients": "between the backward and the optimizer",
    "update": "before the optimizer used it",
    "end": "after the last step",
}

_OWN = frozenset({("update", phases.PARAMETER), ("gradients", phases.GRADIENT)})
"""Moments and stages that are compared with a digest of the same step, which no other check uses."""

Tensor = tuple[str, str]  # stage and name


@dataclass
class _Report:
    """What ranks have reported about one moment of a step."""

    since: float
    changed: dict[int, tuple[list[Tensor], int]] = field(default_factory=dict)
    updates: dict[int, int] = field(default_factory=dict)
    written: dict[int, tuple[list[Tensor], int]] = field(default_factory=dict)
    one_bit: set[int] = field(default_factory=set)
    tensors: int = 0

    def is_clear(self) -> bool:
        """Whether all that has changed are single bits, which no program writes and restores at the update."""
        return not self.written and self.one_bit.issuperset(self.changed)


class AtRest(Detector):
    """A detector that evaluates the reports of `checks.at_rest` about state that has changed."""

    kinds = frozenset({"at_rest"})

    def __init__(self, job: Job, **settings: Any) -> None:
        super().__init__(job)
        self._reports: dict[tuple[int, str], _Report] = {}
        self._restored: set[tuple[int, int]] = set()  # steps and ranks
        self._hashes: list[tuple[int, int]] = []  # ranks and steps in which their hash was wrong
        self._heard: dict[int, int] = {}  # the last moment that each rank has reported
        self._reported: dict[Any, int] = {}
        self._changes: dict[tuple[int, str], tuple[int, int]] = {}  # steps in which a tensor has changed, and the last

    def take(self, message: Message, now: float) -> None:
        """Take a rank's report about tensors that changed or were written, or about a failed test of the hash."""
        body, when = message.body, str(message.body.get("when"))
        if when == "hash":
            self._hashes.append((message.rank, message.step))
        if when not in _WHEN:
            return
        moment = 2 * message.step + (when != "begin") + (when == "end")
        self._heard[message.rank] = max(moment, self._heard.get(message.rank, 0))
        if body.get("restored") is True:
            self._restored.add((message.step, message.rank))
        for kind, count in (("changed", "changes"), ("written", "writes")):
            tensors, number = _tensors(body.get(kind)), body.get(count)
            if tensors and type(number) is int:
                report = self._reports.setdefault((message.step, when), _Report(now))
                getattr(report, kind)[message.rank] = tensors, number
                if body.get("one_bit") is True:
                    report.one_bit.add(message.rank)
                if type(body.get("since")) is int:
                    report.updates[message.rank] = body["since"]
                total = body.get("tensors")
                report.tensors = max(report.tensors, total if type(total) is int else 0)

    def detect(self, now: float) -> list[Finding]:
        """Return findings about the steps whose reports have arrived from all ranks, or are late."""
        return self._detect(now, last=False)

    def finish(self, now: float) -> list[Finding]:
        """Return findings about all remaining steps; no more reports will arrive."""
        return self._detect(now, last=True)

    def _detect(self, now: float, last: bool) -> list[Finding]:
        found = [self._hash(rank, step) for rank, step in self._hashes if not self._often(rank, "hash")]
        self._hashes.clear()
        for (step, when), report in sorted(self._reports.items()):
            moment = 2 * step + (when != "begin" or not report.is_clear()) + (when == "end")
            waiting = len(self._heard) < self.job.world or min(self._heard.values()) < moment
            if waiting and not last and now - report.since < PATIENCE:
                continue
            del self._reports[step, when]
            for rank in (*report.changed, *report.written):
                if (step, rank) in self._restored:
                    found += self._exchanged(step, rank, report)
            found += self._changed(step, when, report)
            found += self._written(step, when, report)
        self._restored = {(step, rank) for step, rank in self._restored if step > max(self._heard.values()) // 2 - 8}
        return found

    def _exchanged(self, step: int, rank: int, report: _Report) -> Iterator[Finding]:
        """Take what a rank has changed and restored out of a report."""
        changed, written = report.changed.pop(rank, None), report.written.pop(rank, None)
        taken = changed or written
        if taken and self._reported.setdefault(("exchanged", rank), 0) == 0:
            self._reported["exchanged", rank] = 1
            tensors, _ = taken
            how = f"exchanged on rank {rank} between two updates, and then put back"
            yield from self._note(step, tensors, how, "its other uses are not checked at rest")

    def _hash(self, rank: int, step: int) -> Finding:
        return Finding(
            "guard",
            "suspect",
            f"rank {rank} hashes a known tensor wrongly, so that none of its digests count",
            "Test this machine.",
            ranks=(rank,), step=step, cause="machine",
        )  # fmt: skip

    def _changed(self, step: int, when: str, report: _Report) -> Iterator[Finding]:
        by_all = self.job.world > 1 and len(report.changed) > self.job.world / 2
        for rank, (tensors, number) in report.changed.items():
            stage, name = tensors[0]
            times, last = self._changes.get((rank, name), (0, -1))
            times += last != step
            self._changes[rank, name] = times, step
            one_bit = rank in report.one_bit
            bulk = number > (8 if self.job.world == 1 else 2) and 2 * number > report.tensors
            if by_all or bulk or (times >= RECURRENT and not one_bit):
                where = "" if by_all else f" on rank {rank}" if self.job.world > 1 else ""
                how = f"written{where} past PyTorch's version counters, such as by `.data`"
                yield from self._note(step, tensors, how)
                if by_all:
                    return
                continue
            if last == step or self._often(rank, "changed"):  # it has changed before in this step
                continue
            shared = (when, stage) not in _OWN and stage != phases.BUFFER
            yield Finding(
                "at_rest",
                "suspect",
                f"a bit of {stage} {name} of rank {rank} flipped {_WHEN[when]}, and nothing wrote it"
                if one_bit
                else f"{stage} {name} of rank {rank} changed {_WHEN[when]}, and no operator wrote it: the program did "
                "(such as by `.data` or NumPy), or the machine",
                "If it happens again on this machine, test its memory."
                if one_bit
                else "Look for code that writes it on this rank; if there is none, test the memory of its machine.",
                ranks=(rank,), step=step, stage="at rest", tensor=named(stage, name),
                cause="machine" if one_bit else "unknown",
                evidence={
                    "when": when, "tensors changed": number, "tensors compared": report.tensors,
                    SINCE: report.updates.get(rank) if shared else None,
                },
            )  # fmt: skip

    def _written(self, step: int, when: str, report: _Report) -> Iterator[Finding]:
        if not report.written:
            return
        writers = sorted(report.written)
        tensors, number = report.written[writers[0]]
        stage, name = tensors[0]
        if self.job.world == 1 or len(writers) > self.job.world / 2:
            yield from self._note(step, tensors, "written by the program between two steps, on all ranks")
        elif not self._often(writers[0], "written"):
            what = f"{stage} {name}" + (f" and {number - 1} more" if number > 1 else "")
            yield Finding(
                "desync",
                "suspect",
                f"{ranks_in_words(writers)} alone wrote {what} {_WHEN[when]}, of {self.job.world} ranks",
                "Look for code that runs on some ranks only.",
                ranks=tuple(writers), step=step, stage="at rest", tensor=named(stage, name), cause="program",
                evidence={"when": when, "tensors written": number},
            )  # fmt: skip

    def _note(
        self, step: int, tensors: list[Tensor], how: str, then: str = "such tensors are not checked at rest"
    ) -> Iterator[Finding]:
        stage, name = tensors[0]
        if self._reported.setdefault(("note", how, stage), step) == step and not self._often(-1, how):
            yield Finding(
                "at_rest", "note", f"{stage} {name} is {how}; {then}",
                step=step, stage="at rest", tensor=named(stage, name), cause="program",
            )  # fmt: skip

    def _often(self, rank: int, kind: str) -> bool:
        times = self._reported["times", rank, kind] = self._reported.get(("times", rank, kind), 0) + 1
        return times > _FINDINGS


def _tensors(raw: Any) -> list[Tensor]:
    if not isinstance(raw, list):
        return []
    return [
        (stage, name)
        for pair in raw
        if isinstance(pair, list) and len(pair) == 2
        for stage, name in [pair]
        if isinstance(stage, str) and isinstance(name, str)
    ]
