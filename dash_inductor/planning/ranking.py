"""Ranks all candidates of a site by predicted time, and says in words why each was chosen, lost, or cannot run.

The planner chooses on a nominal problem, because bits must not depend on lengths or the batch size; predictions are for
the site itself.  If the two disagree, the choice does not change, and the ranking mentions it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..errors import ArgumentError
from ..kernels.families import FAMILIES, family
from ..kernels.family import Candidate, Documents, Family
from ..model.architectures import tables_of
from ..model.mask import Band
from ..model.plan import Plan, Tiles
from ..model.site import Site
from ..schedule.names import NAMES
from . import nominal, planner
from .prediction import GPU, predicted_us, unknown


@dataclass(frozen=True)
class Candidacy:
    """A row of the ranking: a schedule with the tiles of a kernel family, or a family that does not cover the site.

    Args:
        kernel: the name of the kernel family, as in `Plan.kernel`.
        schedule: the name of the schedule; None if the family cannot run the site at all.
        dkdv, dq: its tiles, as in `Plan`; None if the family cannot run the site at all.
        predicted_us: the predicted time of the backward at this site in microseconds; None if there is no prediction.
        critical_path: its time on the planner's nominal problem, by which the planner chooses, in units of one
            128 x 128 tile pair; None if it would have to be simulated.
        chosen: whether the planner chooses it.
        why: why it was chosen, lost, or cannot run, in words.
        plan: the plan that would run it; None if it cannot run.  `Plan.critical_path` is 0 if it was not simulated.
        note: why there is no prediction, in words; empty if there is one, or if it cannot run.
    """

    kernel: str
    schedule: str | None
    dkdv: Tiles | None
    dq: Tiles | None
    predicted_us: float | None
    critical_path: float | None
    chosen: bool
    why: str
    plan: Plan | None
    note: str = ""


@dataclass(frozen=True)
class _Question:
    """The arguments of `rank`, and the planner's choice `best`."""

    site: Site
    arch: str
    named: str | None
    compiler: str
    split_kv: bool
    gpu: str
    documents: Documents | None
    best: planner.Choice

    @property
    def likely(self) -> Band | None:
        return self.site.likely_band


def rank(
    site: Site,
    arch: str,
    schedule: str | None = None,
    *,
    compiler: str = "",
    split_kv: bool = True,
    gpu: str = GPU,
    documents: Documents | None = None,
) -> tuple[Candidacy, ...]:
    """All candidates of a site: first those with a prediction, by time, then the others, last those that cannot run.

    Candidates without a prediction are ordered by critical path.  Exactly one candidate is chosen, or none if no
    kernel covers the site.

    Args:
        site, arch, schedule, compiler, split_kv: as for `planner.plan`.
        gpu, documents: as for `predicted_us`.

    Raises:
        ArgumentError: an architecture, GPU, dtype or schedule is unknown, the schedule cannot run at the site, or the
            documents do not fit the site.
    """
    known = tables_of(arch)
    planner.check_kind(site, arch)
    families = [f for f in FAMILIES if f.device == site.device]
    found = [_uncovered(f, site, known) for f in families if not f.covers(site, known)]
    if len(found) < len(families):
        best = planner.choose(site, arch, schedule)
        question = _Question(site, arch, schedule, compiler, split_kv, gpu, documents, best)
        covered = [
            _candidacy(question, name, kernel, candidate)
            for kernel, candidate in planner.candidates(site, arch)
            for name in NAMES
            if (name == "two_pass") == (candidate.dq is not None)
        ]
        chosen = next(c for c in covered if c.chosen)
        found += covered if schedule is not None else [_compared(c, chosen) for c in covered]
    return tuple(sorted(found, key=_order))


def _order(candidacy: Candidacy) -> tuple[bool, float, float, bool]:
    predicted, path = candidacy.predicted_us, candidacy.critical_path
    return (
        candidacy.plan is None,
        math.inf if predicted is None else predicted,
        math.inf if path is None else path,
        not candidacy.chosen,
    )


def _compared(c: Candidacy, chosen: Candidacy) -> Candidacy:
    """The candidate, with an addition to `why` if its prediction is faster than that of the chosen candidate."""
    if c.predicted_us is None or chosen.predicted_us is None or c.predicted_us >= chosen.predicted_us:
        return c
    return replace(c, why=f"{c.why}; at this site it is predicted to be faster, but choices ignore lengths and batch")


def _uncovered(f: Family, site: Site, arch: str) -> Candidacy:
    return Candidacy(f.name, None, None, None, None, None, False, f.why_not(site, arch), None)


def _candidacy(question: _Question, name: str, kernel: str, candidate: Candidate) -> Candidacy:
    site, arch, best = question.site, question.arch, question.best
    unable = planner.objection(name, kernel, candidate, site.band, question.likely, named=True)
    if unable is not None:
        return Candidacy(kernel, name, candidate.dkdv, candidate.dq, None, None, False, unable, None)
    chosen = (name, kernel, candidate) == (best.schedule, best.kernel, best.candidate)
    scheduled = planner.scheduled_band(name, kernel, site.band, question.likely)
    facts = name, candidate, scheduled, tables_of(arch)
    length = best.length if chosen else None if nominal.must_be_simulated(*facts) else nominal.critical_path(*facts)
    choice = planner.Choice(name, kernel, candidate, length or 0.0)
    plan = planner.made(site, arch, choice, compiler=question.compiler, split_kv=question.split_kv)
    if chosen:
        why = "its critical path is the shortest" if question.named is None else "it was named"
    else:
        why = (
            _objection(question, name, kernel, candidate)
            or _other_family(question, kernel)
            or _longer(best, length, nominal.work(*facts))
        )
    predicted = predicted_us(plan, site, arch, question.gpu, question.documents)
    note = unknown(plan, site, arch, question.gpu, question.documents) or ""
    return Candidacy(kernel, name, candidate.dkdv, candidate.dq, predicted, length, chosen, why, plan, note)


def _objection(question: _Question, name: str, kernel: str, candidate: Candidate) -> str | None:
    """Why the planner excluded a candidate before comparing times, in words; None if it did not."""
    named = question.named
    if named is not None and name != named:
        return f"schedule={named!r} was named"
    if named is None and name not in planner.schedules_for(question.site):
        return f"masks with segments or intervals are planned among {', '.join(planner.UPWARD)}"
    return planner.objection(
        name, kernel, candidate, question.site.band, question.likely, named=named is not None
    )  # fmt: skip


def _other_family(question: _Question, kernel: str) -> str | None:
    """Why the chosen kernel family is preferred to the family `kernel`, in words; None if they are the same."""
    best = question.best.kernel
    if kernel == best:
        return None
    left = family(kernel).leaves(question.site) if question.named is None else None
    return left or f"the {best} kernels are preferred: the times of the two families are not calibrated together"


def _longer(best: planner.Choice, length: float | None, work: float) -> str:
    if length is None:
        return f"its work alone is {_percent(work / best.length)} than the critical path of {best.schedule}"
    if length == best.length:
        return f"its critical path is as long as that of {best.schedule}, which is considered first"
    return f"its critical path is {_percent(length / best.length)} than that of {best.schedule}"


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):.1f} % longer"


def chosen_of(ranking: tuple[Candidacy, ...]) -> Candidacy:
    """The candidate of a ranking that the planner chose.

    Raises:
        ArgumentError: there is none, because no kernel covers the site.
    """
    for candidacy in ranking:
        if candidacy.chosen:
            return candidacy
    raise ArgumentError("ranking", "one without a choice", "that of a site that a kernel covers")
