"""Finds ranks whose copy of gathered parameters differs from the shards that the owners hold.

No vote is needed, because the digests of all owners' shards are known: a copy is right if its digest is their sum.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from ..report.findings import Finding
from ..shared.class_names import members
from ..shared.roots import OWNERS
from ..transport.messages import Message
from .detector import Detector, Job
from .promises import PARTED, parts
from .wording import ranks as ranks_in_words

PATIENCE = 30.0
"""Seconds after which the detector no longer waits for messages about a step."""

ANSWER = 20.0
"""Seconds in which ranks must send the segments that they have gathered."""

_REMEMBERED = 256
_ASKED = 4
_FINDINGS = 64
_WHAT = ("", "forward", "backward")
_LANES = 32  # hexadecimal digits
_ADVICE = (
    "Look for code that writes gathered parameters there (such as by `.data`); if there is none, test its machine and "
    "its network."
)


@dataclass
class _Step:
    """What the ranks of a group have reported about one step.

    Attributes:
        reported: by rank, the digest of all segments, and the lanes of the own shard.
        wrong: ranks whose copy is not what the owners hold, once that is known.
        asked: ranks that were asked for their segments.
        segments: by rank, the lanes of each owner's segment.
    """

    since: float
    reported: dict[int, tuple[str, str]] = field(default_factory=dict)
    wrong: tuple[int, ...] = ()
    asked: tuple[int, ...] = ()
    segments: dict[int, list[str] | None] = field(default_factory=dict)


class GatheredParameters(Detector):
    """A detector that compares the digests of gathered FSDP2 parameters with those of the owners' shards."""

    kinds = frozenset({"gathered_parameters"})

    def __init__(self, job: Job, **settings: Any) -> None:
        super().__init__(job)
        self._steps: dict[tuple[int, str], _Step] = {}
        self._done: dict[tuple[int, str], None] = {}
        self._groups: dict[str, tuple[tuple[int, ...], frozenset[int]]] = {}
        self._findings, self._parted = 0, False

    def take(self, message: Message, now: float) -> None:
        """Store the digests that a rank has sent: of gathered parameters, or of the segments that it was asked for."""
        body = message.body
        if self._parted:
            return
        if "segments" in body:
            of, group = body.get("of"), body.get("group")
            kept = self._steps.get((of, group)) if type(of) is int and isinstance(group, str) else None
            if kept is not None and message.rank in kept.asked:
                raw = body["segments"]
                kept.segments[message.rank] = raw if _is_lanes(raw) else None
            return
        groups = body.get("groups")
        for group, steps in groups.items() if isinstance(groups, dict) else ():
            if not isinstance(group, str) or message.rank not in self._owners(group)[1] or not isinstance(steps, dict):
                continue
            for text, reported in steps.items():
                if not (text.isdecimal() and len(text) < 16 and isinstance(reported, list) and len(reported) == 2):
                    continue
                key = int(text), group
                if key not in self._done and isinstance(reported[0], str) and _is_lanes([reported[1]]):
                    self._steps.setdefault(key, _Step(now)).reported[message.rank] = reported[0], reported[1]

    def observe(self, finding: Finding, now: float) -> None:
        """Stop comparing if a finding says that ranks no longer count the same steps."""
        if parts(finding) and not self._parted:
            self._parted = True
            self._steps.clear()
            self.job.coverage.unseen("gathered_parameters", PARTED)

    def detect(self, now: float) -> list[Finding]:
        """Return new findings about steps in which copies differ, once the ranks concerned have sent details."""
        return self._detect(now, last=False)

    def finish(self, now: float) -> list[Finding]:
        """Return findings about all remaining steps; no more digests will arrive."""
        return self._detect(now, last=True)

    def _detect(self, now: float, last: bool) -> list[Finding]:
        found: list[Finding] = []
        for key in sorted(self._steps):
            step, owners = self._steps[key], self._owners(key[1])[0]
            if not step.asked:
                if len(step.reported) < len(owners):
                    if last or now - step.since > PATIENCE:
                        self.job.coverage.unseen("gathered_parameters", "shards of some owners have not arrived")
                        self._close(key)
                    continue
                self._compare(key, step, owners, now)
            if step.asked and (last or len(step.segments) == len(step.asked) or now - step.since > ANSWER):
                found += self._finding(key, step, owners)
                self._close(key)
        return found

    def _owners(self, group: str) -> tuple[tuple[int, ...], frozenset[int]]:
        """The ranks that the name of a group means; the name may begin with the phase."""
        found = self._groups.get(group)
        if found is None:
            what, _, ranks = group.rpartition(" ")
            owners = members(ranks, self.job.world) if what in _WHAT else None
            found = owners or (), frozenset(owners or ())
            if len(self._groups) < _REMEMBERED * _REMEMBERED:
                self._groups[group] = found
        return found

    def _close(self, key: tuple[int, str]) -> None:
        del self._steps[key]
        self._done[key] = None
        while len(self._done) > _REMEMBERED:
            del self._done[next(iter(self._done))]

    def _compare(self, key: tuple[int, str], step: _Step, owners: tuple[int, ...], now: float) -> None:
        held = _held([step.reported[rank][1] for rank in owners])
        step.wrong = tuple(rank for rank in owners if step.reported[rank][0] != held)
        self.job.coverage.count("gathered_parameters", compared=len(owners))
        if not step.wrong:
            self._close(key)
            return
        step.asked, step.since = step.wrong[:_ASKED], now
        body = {"step": key[0], "group": key[1]}
        self.job.orders.append((step.asked, Message("gathered_parameters", 0, key[0], body)))

    def _finding(self, key: tuple[int, str], step: _Step, owners: tuple[int, ...]) -> list[Finding]:
        self._findings += 1
        if self._findings > _FINDINGS:
            return []
        right = [rank for rank in owners if rank not in step.wrong]
        what, _, group = key[1].rpartition(" ")
        collective = f"all_gather of {group}" + (f" in the {what}" if what else "")
        evidence: dict[str, Any] = {"copies": len(owners), "agree with the shards": len(right), "compared": "lanes"}
        common: dict[str, Any] = {
            "step": key[0], "stage": "activation", "collective": collective, "evidence": evidence,
            "groups": tuple(g for g in (tuple(right), step.wrong) if g),
        }  # fmt: skip
        own = [step.reported[rank][1] for rank in owners]
        apart = {
            owner
            for segments in step.segments.values()
            if segments is not None and len(segments) == len(owners)
            for owner, segment, mine in zip(owners, segments, own, strict=True)
            if segment != mine
        }
        if right or len(owners) < 2:
            others = f"than {ranks_in_words(right)} and the owners hold"
            sentence = f"{ranks_in_words(step.wrong)} gathered different parameters {others}, in {collective}"
            evidence["segments of"] = sorted(apart)[:16]
            return [Finding("collective", "suspect", sentence, _ADVICE, ranks=step.wrong, **common)]
        ranks = tuple(sorted(apart)) if len(apart) < len(owners) else ()
        whose = f"of {ranks_in_words(ranks)}" if ranks else "of some rank"
        sentence = (
            f"{ranks_in_words(owners)} all gathered a shard {whose} that differs from what it holds, in {collective}"
        )
        return [Finding("collective", "suspect", sentence, _ADVICE, ranks=ranks, **common)]


def _held(own: list[str]) -> str:
    """The digest that all ranks have if they have gathered what the owners hold."""
    if len(own) > OWNERS:
        halves = [[int.from_bytes(bytes.fromhex(lanes)[8 * n : 8 * n + 8], "little") for lanes in own] for n in (0, 1)]
        whole = b"".join((sum(numbers) % (1 << 64)).to_bytes(8, "little") for numbers in halves)
    else:
        whole = bytes.fromhex("".join(own))
    return hashlib.blake2b(whole, digest_size=8).hexdigest()


def _is_lanes(raw: Any) -> bool:
    return isinstance(raw, list) and all(
        isinstance(text, str) and len(text) == _LANES and set(text) <= set("0123456789abcdef") for text in raw
    )
