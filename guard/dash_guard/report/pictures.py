"""Pictures of findings as SVG: which rank waits for which, and how late a slow rank comes in its steps.

The data comes from an untrusted file: values of an unexpected form are not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from dash_inductor.untrusted import printable

from .findings import Finding

COLOURS = """
:root { color-scheme: light dark; --ground: #f6f7f9; --card: #fff; --ink: #1b1f27; --soft: #667085; --line: #dfe3ea;
  --note: #667085; --suspect: #93610a; --confirmed: #b42318; --good: #0f7b4f; }
@media (prefers-color-scheme: dark) { :root { --ground: #0f1217; --card: #171b22; --ink: #e6e9ef; --soft: #98a2b3;
  --line: #2a303b; --note: #98a2b3; --suspect: #e2b04a; --confirmed: #ff7b6e; --good: #4cc38a; } }
"""
"""The colours of pictures and of the page."""

STYLE = """
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); } svg .soft { fill: var(--soft); }
svg .rank { fill: var(--card); stroke: var(--soft); stroke-width: 1.5; }
svg .bad { fill: var(--confirmed); stroke: var(--confirmed); } svg .on { fill: #fff; }
svg .edge { stroke: var(--soft); fill: none; } svg .bar { fill: var(--good); } svg .late { fill: var(--suspect); }
"""
"""The style of pictures, in a page that has `COLOURS`."""

LEGENDS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "who waits for whom": (
        ("bad", "the rank that others wait for"),
        ("rank", "a rank that waits; its arrow says for whom"),
    ),
    "time of the peers, and lateness of the rank": (
        ("bar", "the median time of the other ranks"),
        ("late", "how much later this rank came"),
    ),
}
"""The classes of `STYLE` that a picture uses, and their meanings, by the title of the picture."""

_RANKS, _BARS = 24, 16
_WIDTH = 640


def of(finding: Finding) -> str:
    """The picture of a finding as SVG; "" if it has none."""
    if finding.kind in ("hang", "desync"):
        return _graph(finding)
    if finding.kind == "slow":
        return _steps(finding.evidence)
    return ""


def legend(picture: str) -> str:
    """The legend of a picture that `of` has drawn, as HTML."""
    title = picture.partition("<title>")[2].partition("</title>")[0]
    keys = "".join(
        f'<svg class="key" viewBox="0 0 12 12"><circle class="{kind}" cx="6" cy="6" r="5"/></svg>{words} '
        for kind, words in LEGENDS[title]
    )
    return f'<p class="soft">{keys}</p>'


def write(findings: Iterable[Finding], folder: Path) -> None:
    """Write the pictures of findings to SVG files named by the number and the kind of the finding.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, finding in enumerate(findings, 1):
        before, title, after = of(finding).partition("</title>")
        if title:
            style = f"<style>{COLOURS}{STYLE}svg {{ background: var(--card); }}</style>"
            path = folder / f"{number}-{finding.kind}.svg"
            path.write_text(f"{before}{title}{style}{after}\n", encoding="utf-8")


def _graph(finding: Finding) -> str:
    """A graph: waiting ranks on the left, awaited ranks on the right, and an arrow for each wait."""
    edges = [
        (edge[0], edge[1], edge[2])
        for edge in _list(finding.evidence.get("waits"))
        if isinstance(edge, list) and len(edge) == 3 and _is_rank(edge[0]) and _is_rank(edge[1])
    ]
    waited = list(dict.fromkeys(other for _, other, _ in edges))
    waiting = list(dict.fromkeys(rank for rank, _, _ in edges))
    accused = [rank for rank in finding.ranks if rank in waited] or [rank for rank in waited if rank not in waiting]
    left = [rank for rank in waiting if rank not in accused][:_RANKS]
    right = [*accused, *(rank for rank in waited if rank not in accused and rank not in left)][:_RANKS]
    if not edges or not right:
        return ""
    height = 44 * max(len(left), len(right)) + 16
    places = {rank: (90.0, _middle(number, len(left), height)) for number, rank in enumerate(left)}
    places |= {rank: (_WIDTH - 90.0, _middle(number, len(right), height)) for number, rank in enumerate(right)}
    arrow = '<path d="M0 0 L8 4 L0 8 z" class="soft"/>'
    marker = (
        f'<marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">{arrow}'
    )
    lines = [f"<defs>{marker}</marker></defs>"]
    labelled: set[str] = set()
    for rank, other, words in edges:
        if rank not in places or other not in places or rank == other:
            continue
        (x, y), (u, v) = places[rank], places[other]
        length = math.hypot(u - x, v - y) or 1.0
        a, b = (u - x) / length, (v - y) / length
        lines.append(
            f'<line class="edge" x1="{x + 18 * a:.1f}" y1="{y + 18 * b:.1f}" x2="{u - 20 * a:.1f}" '
            f'y2="{v - 20 * b:.1f}" marker-end="url(#to)"/>'
        )
        label = _text(words)
        if label not in labelled:
            labelled.add(label)
            lines.append(f'<text class="soft" x="{(x + u) / 2:.0f}" y="{(y + v) / 2 - 6:.0f}" text-anchor="middle">'
                         f"{label}</text>")  # fmt: skip
    for rank, (x, y) in places.items():
        bad = rank in accused
        lines.append(f'<circle class="{"bad" if bad else "rank"}" cx="{x:.0f}" cy="{y:.0f}" r="17"/>')
        lines.append(
            f'<text class="{"on" if bad else ""}" x="{x:.0f}" y="{y + 4:.0f}" text-anchor="middle">{rank}</text>'
        )
    return _svg(height, "who waits for whom", lines)


def _steps(evidence: Mapping[str, Any]) -> str:
    """A bar for each step: the median time of the peers, and the lateness of the rank."""
    rows = [
        (row[0], float(row[1]), float(row[2]))
        for row in _list(evidence.get("steps"))
        if isinstance(row, list) and len(row) == 3 and all(_is_number(value) for value in row)
    ][-_BARS:]
    most = max((late + base for _, late, base in rows), default=0.0)
    if most <= 0:
        return ""
    width = (_WIDTH - 150) / most
    lines = []
    for number, (step, late, base) in enumerate(rows):
        y = 8 + 24 * number
        lines += [
            f'<text class="soft" x="70" y="{y + 13}" text-anchor="end">step {int(step)}</text>',
            f'<rect class="bar" x="78" y="{y}" width="{base * width:.1f}" height="17"/>',
            f'<rect class="late" x="{78 + base * width:.1f}" y="{y}" width="{late * width:.1f}" height="17"/>',
            f'<text x="{84 + (base + late) * width:.1f}" y="{y + 13}">+{late:.1f} ms</text>',
        ]
    return _svg(24 * len(rows) + 16, "time of the peers, and lateness of the rank", lines)


def _svg(height: float, title: str, lines: list[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" '
        f'height="{height:.0f}"><title>{_text(title)}</title>{"".join(lines)}</svg>'
    )


def _middle(number: int, of: int, height: float) -> float:
    return (number + 0.5) * height / of


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 20


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e9


def _text(value: Any) -> str:
    return escape(printable(str(value)[:80]))
