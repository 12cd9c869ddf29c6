"""Formats a diagnosis as text."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from .findings import Finding, Severity

SHOWN = ("attention", "batch_invariance")
"""The names of the checks whose facts are always printed: which attention was replaced, and what was asked for."""
_COLOURS = {Severity.OK: "32", Severity.NOTE: "36", Severity.WARNING: "33", Severity.ERROR: "31"}


def format_report(findings: Sequence[Finding], *, verbose: bool = True, colours: bool = False, width: int = 100) -> str:
    """Formats findings in the order of severity: the worst last, where a terminal shows it.

    Args:
        findings: the findings.
        verbose: whether to print all facts, findings of severity OK; else one line counts those whose check
            is not in `SHOWN`.
        colours: whether to colour severities with terminal escape sequences.
        width: the number of columns.
    """
    facts = [] if verbose else [one for one in findings if one.severity == Severity.OK and one.check not in SHOWN]
    if facts:
        folded = Finding("", Severity.OK, f"{len(facts)} facts: `dash-inductor doctor -v` prints them")
        findings = [folded, *(one for one in findings if one not in facts)]
    ordered = sorted(findings, key=lambda one: one.severity)
    lines = [line for finding in ordered for line in _lines(finding, colours, width)]
    return "\n".join([*lines, "", summary(findings)])


def _lines(finding: Finding, colours: bool, width: int) -> Iterator[str]:
    head = f"{finding.severity.name.lower():8} {finding.check.replace('_', ' '):24} "
    indent = " " * len(head)
    first, *rest = (part for line in finding.what.split("\n") for part in _wrapped(line, width - len(head)))
    if colours:
        head = f"\033[{_COLOURS[finding.severity]}m{head[:8]}\033[0m{head[8:]}"
    yield head + first
    yield from (indent + line for line in rest)
    if finding.advice:
        wrapped = textwrap.wrap(finding.advice, width - len(indent) - 3, break_on_hyphens=False)
        yield from (f"{indent}{'   ' if i else '-> '}{line}" for i, line in enumerate(wrapped))


def _wrapped(line: str, width: int) -> list[str]:
    """A line in parts of at most `width` columns, of which all but the first are indented twice as far as the line."""
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(line, width, break_on_hyphens=False, subsequent_indent=2 * indent) or [""]


def summary(findings: Sequence[Finding]) -> str:
    """One line with the numbers of errors, warnings and notes."""
    counts = Counter(finding.severity for finding in findings)
    shown = [
        f"{counts[severity]} {severity.name.lower()}{'s' if counts[severity] > 1 else ''}"
        for severity in (Severity.ERROR, Severity.WARNING, Severity.NOTE)
        if counts[severity]
    ]
    return ", ".join(shown) if shown else "Everything is as it should be."
