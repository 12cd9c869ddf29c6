"""Combines findings about the same thing into one entry, as a report shows them: the verdict first.

A suspicion is often reported again when more is known: a busy rank becomes a suspect, a suspect is confirmed, and two
facts about a rank are combined to a verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .findings import SEVERITIES, Finding

_NEAR = 100  # steps between facts that a verdict combines


@dataclass(frozen=True)
class Entry:
    """What is known about one thing.

    Attributes:
        finding: the last finding about it.
        before: earlier findings about it, in the order in which they were made.
    """

    finding: Finding
    before: tuple[Finding, ...] = ()


def entries(findings: Sequence[Finding]) -> list[Entry]:
    """The entries of a report: the most severe ones first, and in each severity the earliest."""
    found: list[Entry] = []
    for finding in findings:
        earlier = [entry for entry in found if _updates(finding, entry.finding)]
        before = tuple(each for entry in earlier for each in (*entry.before, entry.finding))
        found = [entry for entry in found if entry not in earlier]
        found.append(Entry(finding, before))
    return sorted(found, key=lambda entry: (list(SEVERITIES).index(entry.finding.severity), _began(entry)))


def _updates(later: Finding, earlier: Finding) -> bool:
    """Whether a finding says more about what an earlier one is about."""
    if later.kind == earlier.kind == "hang" and later.ranks == earlier.ranks:
        return later.collective == earlier.collective and later.step == earlier.step
    if later.severity != "confirmed" or earlier.severity != "suspect" or earlier.kind not in later.evidence:
        return False
    suspects = {rank for group in ((earlier.ranks,), earlier.groups) for ranks in group for rank in ranks}
    near = later.step is None or earlier.step is None or abs(later.step - earlier.step) <= _NEAR
    return near and suspects.issuperset(later.ranks) and bool(later.ranks)


def _began(entry: Entry) -> float:
    return (*entry.before, entry.finding)[0].time
