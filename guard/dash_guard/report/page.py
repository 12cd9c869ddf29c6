"""Shows the report of a guard as one HTML page that needs no other file and no network."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from dash_inductor.untrusted import printable

from . import pictures
from .entries import Entry, entries
from .findings import SEVERITIES
from .report import BLIND, Report, details, headline, ranks_seen, when

_STYLE = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.55 system-ui, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 22px; line-height: 1.3; margin: 0 0 4px; } h2 { font-size: 15px; margin: 0 0 12px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px;
  margin: 16px 0; overflow-wrap: anywhere; }
.note { border-left: 6px solid var(--note); } .suspect { border-left: 6px solid var(--suspect); }
.confirmed { border-left: 6px solid var(--confirmed); }
.kind { font-weight: 600; text-transform: uppercase; font-size: 12px; letter-spacing: .08em; color: var(--soft); }
table { border-collapse: collapse; width: 100%; }
td { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td:first-child { color: var(--soft); white-space: nowrap; } tr:last-child td { border-bottom: 0; }
p { margin: 4px 0 10px; } .key { width: 12px; height: 12px; margin: 0 6px -1px 12px; }
.soft { color: var(--soft); } .scroll { overflow-x: auto; }
"""


def html(report: Report) -> str:
    """The HTML page of a report."""
    title = f"Guard: {headline(report)}"
    parts = [_entry(entry) for entry in entries(report.findings)]
    parts.append(_legend(report))
    parts.append(_section("What was checked", _coverage(report)))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{pictures.COLOURS}{_STYLE}{pictures.STYLE}</style></head><body><main>"
        f'<h1>{_text(title)}</h1><div class="soft">{_text(report.folder)}; {_text(ranks_seen(report))}</div>'
        f"{''.join(parts)}</main></body></html>\n"
    )


def _entry(entry: Entry) -> str:
    finding = entry.finding
    picture = pictures.of(finding)
    drawn = f'<div class="scroll">{picture}</div>{pictures.legend(picture)}' if picture else ""
    return (
        f'<section class="{finding.severity}"><div class="kind">{finding.severity} · {_text(finding.kind)}</div>'
        f"<p>{_text(when(finding) + finding.sentence)}</p>{drawn}{_table(details(entry))}</section>"
    )


def _legend(report: Report) -> str:
    """The meaning of the severities that the page has."""
    there = {finding.severity for finding in report.findings}
    meanings = [f"{severity}: {meaning}" for severity, meaning in SEVERITIES.items() if severity in there]
    return f'<p class="soft">{_text("; ".join(meanings))}</p>' if meanings else ""


def _coverage(report: Report) -> str:
    rows = []
    for check, entry in report.coverage.items():
        counts = ", ".join(f"{number} {name}" for name, number in entry["counts"].items()) or "nothing"
        rows.append((check, "; ".join([counts, *(f"not: {why} ({n} times)" for why, n in entry["unseen"].items())])))
    return f"{_table(rows)}<p class='soft'>What no guard sees: {_text(BLIND)}.</p>"


def _section(title: str, content: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{content}</section>"


def _table(rows: Iterable[tuple[str, str]]) -> str:
    body = "".join(f"<tr><td>{_text(name)}</td><td>{_text(value)}</td></tr>" for name, value in rows)
    return f'<div class="scroll"><table>{body}</table></div>'


def _text(text: str) -> str:
    return escape(printable(text))
