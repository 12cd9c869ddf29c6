"""`Explanation`: what becomes of every attention of a program, every candidate for it, and why; as text, JSON, HTML."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TextIO

import torch

from ..config import config
from ..errors import ArgumentError
from ..model.plan import Decision, Kept, Plan
from ..model.reasons import Reason
from ..model.site import Site
from ..planning import decide
from ..planning.ranking import Candidacy, rank
from ..records.records import GraphRecord, SiteRecord
from ..upstream import arch as machine
from ..upstream import toolchain

OF_THE_PLANNER = (
    Reason.HEAD_DIM, Reason.VALUE_DIM, Reason.MASK_UNSUPPORTED, Reason.SCHEDULE_UNSUPPORTED, Reason.COMPILE_FAILED,
)  # fmt: skip
"""Reasons of an architecture: on another one the site may have a plan."""


@dataclass(frozen=True)
class SiteExplanation:
    """What becomes of one attention, and why.

    Attributes:
        record: the record of the site, as `dash_inductor.sites` has it.
        decision: what becomes of it on `arch`: a plan, or the reason why it is kept.
        arch: the architecture that is asked about, for example "sm_90"; "" where none is known.
        site: the facts that candidates depend on, on that architecture; None where they could not be established.
        candidates: every candidate for it on `arch`, the shortest predicted time first, last what cannot run; empty
            where the facts that candidates depend on could not be established.
    """

    record: SiteRecord
    decision: Decision
    arch: str
    site: Site | None
    candidates: tuple[Candidacy, ...]

    @property
    def plan(self) -> Plan | None:
        """What runs on `arch`; None where the site is kept."""
        return self.decision if isinstance(self.decision, Plan) else None

    @property
    def kept(self) -> Kept | None:
        """Why the site is kept on `arch`; None where it is replaced."""
        return self.decision if isinstance(self.decision, Kept) else None

    @property
    def advice(self) -> str:
        """What would make a kept site replaceable; "" for a replaced one."""
        return self.kept.reason.advice if self.kept is not None else ""

    @property
    def predicted_us(self) -> float | None:
        """Predicted time of the backward on `arch`, in microseconds; None where nothing predicts it."""
        return next((candidate.predicted_us for candidate in self.candidates if candidate.chosen), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, strings and numbers only, for JSON."""
        kept = self.kept
        return {
            **self.record.as_dict(),
            "decision": {
                "arch": self.arch,
                "status": "replaced" if kept is None else "kept",
                "plan": str(self.plan) if self.plan else None,
                "numerics_key": self.plan.numerics_key if self.plan else None,
                "predicted_us": self.predicted_us,
                "reason": kept.reason.value if kept else None,
                "explanation": kept.reason.explanation if kept else None,
                "detail": kept.detail if kept else "",
                "advice": self.advice,
            },
            "candidates": [_candidate(candidate) for candidate in self.candidates],
        }


@dataclass(frozen=True)
class Explanation:
    """What becomes of every attention of some compiled graphs.

    ``str`` is a table of at most 100 columns, made by rich where that is installed.

    Attributes:
        graphs: the records of the graphs, oldest first.
        sites: what becomes of their sites: graph by graph, in the order in which the forward runs them.
        notes: what a reader must know beside that, in sentences.
        unknown: why it is not known what becomes of every attention; `sites` may be a part of them then.  "" where it
            is known.
    """

    graphs: tuple[GraphRecord, ...]
    sites: tuple[SiteExplanation, ...]
    notes: tuple[str, ...] = ()
    unknown: str = ""

    @staticmethod
    def of(
        graphs: Iterable[GraphRecord], arch: str | None = None, notes: Sequence[str] = (), unknown: str = ""
    ) -> Explanation:
        """The explanation of these graphs on `arch`, by default the architecture for which they were compiled.

        Raises:
            ArgumentError: an unknown architecture, or "cpu" for graphs of a GPU.
        """
        graphs = tuple(graphs)
        sites = tuple(_explained(site, arch) for graph in graphs for site in graph.sites)
        return Explanation(graphs, sites, tuple(notes), unknown)

    @property
    def graph_of(self) -> tuple[GraphRecord, ...]:
        """For every one of `sites` its graph."""
        return tuple(graph for graph in self.graphs for _ in graph.sites)

    @property
    def all_replaced(self) -> bool:
        """Whether there are attention sites, and all of them are known and replaced."""
        return not self.unknown and bool(self.sites) and all(site.kept is None for site in self.sites)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, strings and numbers only, for JSON."""
        explained = iter(self.sites)
        graphs = [
            {**graph.as_dict(), "sites": [next(explained).to_dict() for _ in graph.sites]} for graph in self.graphs
        ]
        return {"graphs": graphs, "notes": list(self.notes), "unknown": self.unknown}

    def to_html(self) -> str:
        """A page of its own, which asks no other file and no network for anything."""
        from . import page as explanation_page

        return explanation_page.page(self)

    def __str__(self) -> str:
        from . import text as explanation_text

        return explanation_text.text(self)

    def show(self, file: TextIO | None = None) -> None:
        """Print to `file`, by default the standard output; in colours if that is a terminal and rich is installed."""
        from . import text as explanation_text

        explanation_text.show(self, file)


def _explained(record: SiteRecord, arch: str | None) -> SiteExplanation:
    decision: Decision = Kept(record.reason, record.detail) if record.reason is not None else _plan_of(record)
    if arch is None:
        site, arch = record.site, record.arch
    else:
        site = None if record.site is None else _moved(record.site, arch)
        if site is not None and (record.reason is None or record.reason in OF_THE_PLANNER):
            decision = decide(site, arch, config.schedule, compiler=toolchain.settings())
    if site is None or not arch:
        return SiteExplanation(record, decision, arch, site, ())
    named = config.schedule if isinstance(decision, Plan) and decision.schedule == config.schedule else None
    candidates = _ranked(site, arch, named, toolchain.settings())
    if isinstance(decision, Kept):
        candidates = tuple(replace(candidate, chosen=False) for candidate in candidates)
    return SiteExplanation(record, decision, arch, site, candidates)


@functools.lru_cache(maxsize=256)
def _ranked(site: Site, arch: str, schedule: str | None, compiler: str) -> tuple[Candidacy, ...]:
    try:
        return rank(site, arch, schedule, compiler=compiler)
    except ArgumentError:  # an architecture without tables, which is why the site is kept
        return ()


def _plan_of(record: SiteRecord) -> Plan:
    assert record.plan is not None  # a record has a reason or a plan
    return record.plan


def _moved(site: Site, arch: str) -> Site:
    """The same attention on a device of another architecture."""
    if arch == "cpu":
        return replace(site, device="cpu", allow_tf32=False)
    tf32 = site.dtype == "float32" and machine.allow_tf32(torch.device("cuda"))
    return replace(site, device="cuda", allow_tf32=tf32)


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
