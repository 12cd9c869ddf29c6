"""Builds the parts of HTML pages, which are self-contained: light or dark as the system, no network access."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from ..version import __version__
from .text_blocks import filled

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src 'self' data:; script-src 'none'"
"""The content security policy: only images next to the page are loaded, and no script runs."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d1d1f; --soft: #6a6a70; --line: #dcdce0; --page: #fbfbfa; --card: #fff;
  --good: #1f7a45; --good-back: #e2f4e8; --bad: #a2520c; --bad-back: #fdecdc; --link: #1659b5; --code: #f3f3f1 }
@media (prefers-color-scheme: dark) { :root { --ink: #ececf0; --soft: #a0a0a8; --line: #3a3a40; --page: #17171a;
  --card: #1f1f23; --good: #6fd497; --good-back: #16351f; --bad: #f0a35e; --bad-back: #3d2609; --link: #7fb2f5;
  --code: #28282d } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif }
main { max-width: 1180px; margin: 0 auto; padding: 28px 24px 72px }
header { border-bottom: 1px solid var(--line); margin-bottom: 22px; padding-bottom: 14px }
h1 { font-size: 25px; line-height: 1.25; margin: 4px 0 6px; letter-spacing: -.01em }
h2 { font-size: 18px; margin: 0 } h3 { font-size: 14px; margin: 22px 0 8px }
a { color: var(--link); text-decoration: none } a:hover { text-decoration: underline }
.soft, .legend { color: var(--soft) } .legend { font-size: 13px } .trail { font-size: 13px; color: var(--soft) }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px;
  margin: 18px 0 }
.head { display: flex; gap: 12px; align-items: baseline; flex-wrap: wrap }
.tag { border-radius: 99px; font-size: 12.5px; font-weight: 600; padding: 2px 10px; white-space: nowrap }
.tag.replaced { color: var(--good); background: var(--good-back) }
.tag.fallback { color: var(--bad); background: var(--bad-back) }
code, pre, td.mono { font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
code { background: var(--code); border-radius: 4px; padding: 1px 4px; overflow-wrap: anywhere }
pre { background: var(--code); border-radius: 8px; padding: 12px 14px; overflow: auto; max-height: 460px;
  margin: 8px 0 }
pre .add { color: var(--good) } pre .del { color: var(--bad) } pre .at { color: var(--soft) }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 5px 18px; margin: 12px 0 0 }
dt { color: var(--soft) } dd { margin: 0; overflow-wrap: anywhere }
.note { background: var(--bad-back); border-radius: 8px; padding: 8px 12px; margin: 8px 0 }
.wide { overflow-x: auto } table { border-collapse: collapse; width: 100%; margin: 6px 0 }
th { color: var(--soft); font-weight: 500; font-size: 13px; text-align: left; white-space: nowrap }
th, td { border-bottom: 1px solid var(--line); padding: 6px 14px 6px 0; vertical-align: top }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
tr.marked td { color: var(--good); font-weight: 600 } tr:last-child td { border-bottom: 0 }
summary { cursor: pointer; color: var(--soft); margin-top: 14px } summary:hover { color: var(--ink) }
figure { margin: 10px 0 } figcaption { color: var(--soft); font-size: 13px; margin-bottom: 6px }
.figures { display: flex; gap: 22px; flex-wrap: wrap; align-items: flex-start } .figures figure { min-width: 0 }
.links { display: flex; gap: 8px 18px; flex-wrap: wrap }
"""


def page(title: str, body: Iterable[str], trail: str = "") -> str:
    """Returns a complete HTML page.

    Args:
        title: plain text, the page's title and heading.
        body: the parts of the page, HTML.
        trail: HTML above the heading, for links to the parent pages.
    """
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body><main><header><div class=trail>{trail or 'dash_inductor'}</div>"
        f"<h1>{escape(title)}</h1></header>\n" + "\n".join(body) + "\n"
        f"<p class=legend>dash_inductor {escape(__version__)}</p></main></body></html>\n"
    )


def words(text: str) -> str:
    """Converts a sentence to HTML, with text in backticks as code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Returns an HTML list of labels, each with its text (HTML); pairs without a text are left out."""
    rows = "".join(f"<dt>{escape(label)}</dt><dd>{text}</dd>" for label, text in pairs if text)
    return f"<dl>{rows}</dl>" if rows else ""


def table(header: Sequence[str], rows: Iterable[Sequence[str]], marked: Iterable[int] = ()) -> str:
    """Returns an HTML table; columns without a text are left out.

    Args:
        header: the column names; a name that begins with ``>`` marks a column of numbers, aligned right.
        rows: the cells of each row, HTML.
        marked: the indices of highlighted rows.
    """
    marked = frozenset(marked)
    header, rows = filled(header, list(rows))
    kinds = [" class=number" if name.startswith(">") else "" for name in header]
    names = "".join(f"<th{k}>{escape(name.removeprefix('>'))}</th>" for name, k in zip(header, kinds, strict=True))
    lines = [f"<tr>{names}</tr>"]
    for number, row in enumerate(rows):
        cells = "".join(f"<td{k}>{cell}</td>" for cell, k in zip(row, kinds, strict=True))
        lines.append(f"<tr{' class=marked' if number in marked else ''}>{cells}</tr>")
    return f"<div class=wide><table>{''.join(lines)}</table></div>"


def details(summary: str, content: str, *, opened: bool = False) -> str:
    """Returns an HTML `details` element: a summary that unfolds to show `content` (HTML)."""
    return f"<details{' open' if opened else ''}><summary>{escape(summary)}</summary>{content}</details>"


def diff(text: str) -> str:
    """Returns a unified diff as HTML with coloured lines."""
    kinds = {"+": "add", "-": "del", "@": "at"}
    lines = (
        f'<span class="{kinds[line[0]]}">{escape(line)}</span>' if line[:1] in kinds else escape(line)
        for line in text.splitlines()
    )
    return "<pre>" + "\n".join(lines) + "</pre>"
