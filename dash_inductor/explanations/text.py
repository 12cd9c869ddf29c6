"""An explanation as text: a table of all sites, then a section for each group of equal sites."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ..model.plan import Plan
from ..planning.ranking import Candidacy
from . import text_blocks
from .explained import Explained, SiteExplanation
from .text_blocks import Block, Fields, Heading, Table

MARK = (">", "chosen")

Group = list[tuple[int, SiteExplanation]]
"""Sites with their numbers that differ only in their modules."""

_PATHS = 3


def text(explanation: Explained, width: int) -> str:
    """Returns an explanation as text with lines of at most `width` columns."""
    return text_blocks.text(list(blocks(explanation)), width)


def blocks(explanation: Explained) -> Iterator[Block]:
    """Yields the blocks of an explanation's text: headings, fields and tables."""
    yield Heading(headline(explanation))
    yield Fields(tuple(("unknown", reason) for reason in (explanation.unknown,) if reason))
    yield Fields(tuple(("note", note) for note in explanation.notes))
    yield Fields(tuple(("graph", str(graph).removeprefix("graph ")) for graph in explanation.graphs))
    yield Fields(tuple(beside(explanation)))
    groups = grouped(explanation)
    if groups:
        header = (">site", "module", "shape", "mask", "what runs", ">µs")
        yield Table(header, tuple(map(_row, groups)))
    for group in groups:
        yield from _group(group)
    if any(site.candidates for site in explanation.sites):
        yield Heading("")
        yield Fields((MARK, *legend(explanation)))


def legend(explanation: Explained) -> Iterator[tuple[str, str]]:
    """Yields the columns of numbers in the tables of an explanation: (name, meaning)."""
    candidates = [candidate for site in explanation.sites for candidate in site.candidates]
    if any(candidate.predicted_us is not None for candidate in candidates):
        yield "µs", "predicted time of the backward at these sizes"
    if candidates:
        yield "path", "critical path on the planner's nominal problem, in tile pairs: the shortest is chosen"


def beside(explanation: Explained) -> Iterator[tuple[str, str]]:
    """Yields what passes other than that of attention did: (the pass's name, a text), for each node on record."""
    for record in (record for graph in explanation.graphs for record in graph.others):
        where = f", at {record.line}" + (f" in {record.module}" if record.module else "") if record.line else ""
        fallback = f", {record.reason.value}: {record.reason.explanation}" if record.reason is not None else ""
        yield record.rewrite, f"{record.name} {record.status}{fallback}: {record.detail}{where}"


def headline(explanation: Explained) -> str:
    """Returns a one-line summary, for example ``5 of 6 attention sites replaced on sm_90, 1 not replaced``."""
    if explanation.unknown:
        return "what becomes of every attention is unknown"
    fallback = sum(site.fallback is not None for site in explanation.sites)
    sites = len(explanation.sites)
    archs = sorted({site.arch for site in explanation.sites if site.arch})
    where = f" on {' and '.join(archs)}" if archs else ""
    if not sites:
        return "no attention was seen"
    return f"{sites - fallback} of {sites} attention site{'s' * (sites > 1)} replaced{where}, {fallback} not replaced"


def grouped(explanation: Explained) -> list[Group]:
    """Numbers the sites of an explanation from 1, and groups those with equal outcomes."""
    groups: dict[object, Group] = {}
    for number, (graph, site) in enumerate(zip(explanation.graph_of, explanation.sites, strict=True), start=1):
        record = site.record
        same = graph.compile_id, record.line, record.shape, record.inputs, record.recognised, site.decision
        groups.setdefault((*same, record.mask, record.detail, site.candidates), []).append((number, site))
    return list(groups.values())


def numbers(group: Group) -> str:
    """The numbers of a group's sites as a text of ranges, for example ``1-5, 7``."""
    runs: list[list[int]] = []
    for number, _ in group:
        if runs and runs[-1][-1] == number - 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def module(group: Group) -> str:
    """The module paths of a group's sites, with ``*`` for layer numbers in which they differ; at most three."""
    alike: dict[str, list[list[str]]] = {}
    for path in dict.fromkeys(site.record.module for _, site in group if site.record.module):
        alike.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", path), []).append(path.split("."))
    found = [
        ".".join(names[0] if len(set(names)) == 1 else "*" for names in zip(*paths, strict=True))
        for paths in alike.values()
    ]
    return ", ".join(found[:_PATHS] + ["..."] * (len(found) > _PATHS))


def microseconds(predicted: float | None) -> str:
    """Formats a predicted time in microseconds with at least three significant digits; "" if there is none."""
    return "" if predicted is None else f"{predicted:.3g}" if predicted < 1000 else f"{predicted:.0f}"


def tiles(candidate: Candidacy) -> str:
    """The tile shapes, warps and pipeline stages of a candidate as text, for example ``64x64w4s2 dq 128x64w8s3``."""
    return f"{candidate.dkdv or ''}" + (f" dq {candidate.dq}" if candidate.dq else "")


def facts(group: Group) -> list[tuple[str, str]]:
    """The facts about the sites of a group as pairs of a label and a text; texts that do not apply are ""."""
    site = group[0][1]
    record, plan, fallback = site.record, site.plan, site.fallback
    inputs = f"read from {', '.join(record.inputs)}" if record.inputs else ""
    scale = "" if record.site is None else f"scale {record.site.scale:.4g}"
    where = f"{record.line} in {module(group)}" if record.line and record.module else record.line
    return [
        ("at", where),
        ("attention", ", ".join(filter(None, (record.shape, scale)))),
        ("mask", "; ".join(filter(None, (record.mask, inputs, record.recognised)))),
        ("runs", _runs(plan) if plan else ""),
        ("prediction", next((f"none, {c.note}" for c in site.candidates if c.chosen and c.note), "")),
        ("bits", plan.numerics_key if plan else ""),
        ("detail", record.detail if fallback is None else ""),
        ("not replaced", f"{fallback.reason.value}: {fallback.reason.explanation}" if fallback else ""),
        ("detail", fallback.detail if fallback else ""),
        ("what to do", site.advice),
    ]


def candidates(site: SiteExplanation) -> tuple[Sequence[Candidacy], str]:
    """Returns a site's candidates that can run, and a text that says why the others cannot."""
    able = [candidate for candidate in site.candidates if candidate.plan is not None]
    not_able = [candidate for candidate in site.candidates if candidate.plan is None]
    return able, "; ".join(f"{' '.join(filter(None, (c.kernel, c.schedule)))}: {c.why}" for c in not_able)


def _row(group: Group) -> tuple[str, ...]:
    site = group[0][1]
    record, plan = site.record, site.plan
    runs = f"{plan.kernel} {plan.schedule}" if plan else ""
    if site.fallback:
        runs = f"not replaced: {site.fallback.reason.value}"
    return numbers(group), module(group), record.shape, record.mask, runs, microseconds(site.predicted_us)


def _group(group: Group) -> Iterator[Block]:
    site = group[0][1]
    yield Heading(f"site{'s' * (len(group) > 1)} {numbers(group)}: {site.record.name}")
    yield Fields(tuple(facts(group)))
    able, not_able = candidates(site)
    families: dict[str, list[Candidacy]] = {}
    for candidate in able:
        families.setdefault(f"{candidate.kernel}, tiles {tiles(candidate)}", []).append(candidate)
    yield from (_ranking(title, members) for title, members in families.items())
    if not_able:
        yield Heading("")
    yield Fields((("cannot run", not_able),))


def _ranking(title: str, members: Sequence[Candidacy]) -> Table:
    """A table of the candidates of one kernel family with the same tiles."""
    rows = tuple(
        (
            c.schedule or "", microseconds(c.predicted_us),
            "" if c.critical_path is None else f"{c.critical_path:.0f}", c.why,
        )
        for c in members
    )  # fmt: skip
    return Table(
        ("schedule", ">µs", ">path", "why"),
        rows,
        title,
        frozenset(number for number, c in enumerate(members) if c.chosen),
    )


def _runs(plan: Plan) -> str:
    forward = "PyTorch's own forward" if plan.forward == "keep" else f"forward {plan.forward} {plan.forward_tiles}"
    dq = f", dq {plan.dq}" if plan.dq else ""
    tf32 = ", tf32" if plan.tf32 else ""
    return f"{plan.kernel} {plan.schedule}, tiles {plan.dkdv}{dq}, head chunks of {plan.head_chunk}, {forward}{tf32}"
