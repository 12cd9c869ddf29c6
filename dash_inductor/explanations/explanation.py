"""`Explanation`: the outcome of every attention of a program, all candidates, and reasons, as text, JSON and HTML."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from ..config import config
from ..errors import ArgumentError
from ..model.architectures import architecture
from ..model.plan import Decision, Fallback, Plan
from ..model.reasons import Reason
from ..model.site import Site
from ..planning import decide
from ..planning.ranking import Candidacy, rank
from ..records.records import GraphRecord, SiteRecord
from ..upstream import arch as machine
from ..upstream import toolchain
from . import page, text
from .explained import Explained, SiteExplanation
from .text_blocks import WIDTH

OF_THE_PLANNER = (
    Reason.HEAD_DIM, Reason.VALUE_DIM, Reason.MASK_UNSUPPORTED, Reason.SCHEDULE_UNSUPPORTED, Reason.COMPILE_FAILED,
)  # fmt: skip
"""Reasons that depend on the architecture: on another one, the site may have a plan."""


@dataclass(frozen=True)
class Explanation(Explained):
    """The outcome of every attention in some compiled graphs; `Explained` describes its data.

    ``str`` gives a text of at most 100 columns.
    """

    @staticmethod
    def of(
        graphs: Iterable[GraphRecord], arch: str | None = None, notes: Sequence[str] = (), unknown: str = ""
    ) -> Explanation:
        """Makes the explanation of graphs on `arch`, by default the architecture for which they were compiled.

        Args:
            graphs: the records of the graphs.
            arch: the architecture, or a GPU, as for `explain`.
            notes, unknown: as in `Explained`.

        Raises:
            ArgumentError: an unknown architecture, or "cpu" for graphs of a GPU.
        """
        graphs, arch = tuple(graphs), None if arch is None else architecture(arch)
        sites = tuple(_explained(site, arch) for graph in graphs for site in graph.sites)
        return Explanation(graphs, sites, tuple(notes), unknown)

    def to_html(self) -> str:
        """The explanation as a self-contained HTML page, which loads no other file and does not access the network."""
        return page.page(self)

    def to_text(self, width: int = WIDTH) -> str:
        """The explanation as text with lines of at most `width` columns."""
        return text.text(self, width)

    def __str__(self) -> str:
        return self.to_text()


def _explained(record: SiteRecord, arch: str | None) -> SiteExplanation:
    decision: Decision = Fallback(record.reason, record.detail) if record.reason is not None else _plan_of(record)
    if arch is None:
        site, arch = record.site, record.arch
    else:
        site = None if record.site is None else _moved(record.site, arch)
        if site is not None and (record.reason is None or record.reason in OF_THE_PLANNER):
            decision = decide(site, arch, config.schedule, compiler=toolchain.numerics(), split_kv=config.split_kv)
    if site is None or not arch:
        return SiteExplanation(record, decision, arch, site, ())
    named = config.schedule if isinstance(decision, Plan) and decision.schedule == config.schedule else None
    candidates = _ranked(site, arch, named, toolchain.numerics(), config.split_kv)
    if isinstance(decision, Fallback):
        candidates = tuple(replace(candidate, chosen=False) for candidate in candidates)
    return SiteExplanation(record, decision, arch, site, candidates)


@functools.lru_cache(maxsize=256)
def _ranked(site: Site, arch: str, schedule: str | None, compiler: str, split_kv: bool) -> tuple[Candidacy, ...]:
    try:
        return rank(site, arch, schedule, compiler=compiler, split_kv=split_kv)
    except ArgumentError:  # an architecture without tables, which is why the site is not replaced
        return ()


def _plan_of(record: SiteRecord) -> Plan:
    assert record.plan is not None  # a record has a reason or a plan
    return record.plan


def _moved(site: Site, arch: str) -> Site:
    """The site of the same attention on another architecture."""
    if arch == "cpu":
        return replace(site, device="cpu", allow_tf32=False)
    tf32 = site.dtype == "float32" and machine.allow_tf32(torch.device("cuda"))
    return replace(site, device="cuda", allow_tf32=tf32)
