"""The classes that hold an explanation as data: the outcome of every attention of a program, and its candidates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..model.plan import Decision, Fallback, Plan
from ..model.site import Site
from ..planning.ranking import Candidacy
from ..records.records import GraphRecord, SiteRecord


@dataclass(frozen=True)
class SiteExplanation:
    """The outcome of one attention, and the reason for it.

    Attributes:
        record: the record of the site, as in `dash_inductor.sites`.
        decision: the plan on `arch`, or the reason why the site is not replaced.
        arch: the architecture for which it is explained, for example "sm_90"; "" if none is known.
        site: the facts for planning on that architecture; None if they could not be established.
        candidates: all candidates on `arch`, by predicted time, those that cannot run last; empty if `site` is None.
    """

    record: SiteRecord
    decision: Decision
    arch: str
    site: Site | None
    candidates: tuple[Candidacy, ...]

    @property
    def plan(self) -> Plan | None:
        """The plan that runs on `arch`; None if the site is not replaced."""
        return self.decision if isinstance(self.decision, Plan) else None

    @property
    def fallback(self) -> Fallback | None:
        """Why the site is not replaced on `arch`; None if it is replaced."""
        return self.decision if isinstance(self.decision, Fallback) else None

    @property
    def advice(self) -> str:
        """What to change so that this attention would be replaced; "" if it is replaced already."""
        return self.fallback.reason.advice if self.fallback is not None else ""

    @property
    def predicted_us(self) -> float | None:
        """The predicted time of the backward on `arch`, in microseconds; None if there is no prediction."""
        return next((candidate.predicted_us for candidate in self.candidates if candidate.chosen), None)

    def to_dict(self) -> dict[str, Any]:
        """The explanation as lists, strings and numbers, for JSON."""
        fallback = self.fallback
        return {
            **self.record.as_dict(),
            "decision": {
                "arch": self.arch,
                "status": "replaced" if fallback is None else "fallback",
                "plan": str(self.plan) if self.plan else None,
                "numerics_key": self.plan.numerics_key if self.plan else None,
                "predicted_us": self.predicted_us,
                "reason": fallback.reason.value if fallback else None,
                "explanation": fallback.reason.explanation if fallback else None,
                "detail": fallback.detail if fallback else "",
                "advice": self.advice,
            },
            "candidates": [_candidate(candidate) for candidate in self.candidates],
        }


@dataclass(frozen=True)
class Explained:
    """The data of an explanation: the outcome of every attention in some compiled graphs.

    Attributes:
        graphs: the records of the graphs, oldest first.
        sites: the outcomes of their sites, graph by graph, in the order in which the forward runs them.
        notes: notes for the reader, in sentences.
        unknown: why the outcome of some attention is not known, in which case `sites` may be incomplete; "" if all are
            known.
    """

    graphs: tuple[GraphRecord, ...]
    sites: tuple[SiteExplanation, ...]
    notes: tuple[str, ...] = ()
    unknown: str = ""

    @property
    def graph_of(self) -> tuple[GraphRecord, ...]:
        """The record of the graph that contains each of `sites`, in the same order."""
        return tuple(graph for graph in self.graphs for _ in graph.sites)

    @property
    def all_replaced(self) -> bool:
        """Whether every attention is replaced; False if there is none, or if the outcome of some is unknown."""
        return not self.unknown and bool(self.sites) and all(site.fallback is None for site in self.sites)

    def to_dict(self) -> dict[str, Any]:
        """The explanation as lists, strings and numbers, for JSON."""
        explained = iter(self.sites)
        graphs = [
            {**graph.as_dict(), "sites": [next(explained).to_dict() for _ in graph.sites]} for graph in self.graphs
        ]
        return {"graphs": graphs, "notes": list(self.notes), "unknown": self.unknown}


def _candidate(candidate: Candidacy) -> dict[str, Any]:
    return {
        "kernel": candidate.kernel,
        "schedule": candidate.schedule,
        "dkdv": str(candidate.dkdv) if candidate.dkdv else None,
        "dq": str(candidate.dq) if candidate.dq else None,
        "predicted_us": candidate.predicted_us,
        "critical_path": candidate.critical_path,
        "chosen": candidate.chosen,
        "why": candidate.why,
    }
