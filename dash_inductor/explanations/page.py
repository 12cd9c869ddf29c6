"""An explanation as an HTML page: a table of all sites, and a card for each group of equal sites."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape

from . import html
from . import text as words
from .explained import Explained, SiteExplanation

Extra = Callable[[int], str]
"""A function from the number of a card's first site, from 1, to further HTML for the card."""


def page(explanation: Explained) -> str:
    """Returns an explanation as a complete HTML page."""
    return html.page(words.headline(explanation), body(explanation))


def body(explanation: Explained, extra: Extra = lambda number: "") -> Iterator[str]:
    """Yields the HTML parts of an explanation's page: notes, graphs, the table of sites, a card for each group.

    Args:
        explanation: the explanation.
        extra: returns more HTML for the card of a group, given the number of its first site.
    """
    if explanation.unknown:
        yield f'<p class="note">Unknown: {html.words(explanation.unknown)}</p>'
    yield from (f'<p class="note">{html.words(note)}</p>' for note in explanation.notes)
    yield "".join(f'<p class="soft">{escape(str(graph))}</p>' for graph in explanation.graphs)
    yield html.facts((label, html.words(text)) for label, text in words.beside(explanation))
    if not explanation.sites:
        return
    header = (">site", "module", "line", "shape", "mask", "what runs", ">µs")
    yield html.table(header, (_row(number, site) for number, site in enumerate(explanation.sites, start=1)))
    yield from (_card(group, extra(group[0][0])) for group in words.grouped(explanation))
    yield "".join(
        f'<p class="legend"><b>{escape(name)}</b>: {escape(text)}</p>' for name, text in words.legend(explanation)
    )


def _row(number: int, site: SiteExplanation) -> tuple[str, ...]:
    record, plan = site.record, site.plan
    runs = f"{plan.kernel} {plan.schedule}" if plan else ""
    if site.fallback is not None:
        runs = f"<span class='tag fallback'>not replaced: {site.fallback.reason.value}</span>"
    link = f'<a href="#site-{number}">{number}</a>'
    return (
        link, escape(record.module), escape(record.line), escape(record.shape), escape(record.mask), runs,
        words.microseconds(site.predicted_us),
    )  # fmt: skip


def _card(group: words.Group, extra: str) -> str:
    site = group[0][1]
    status = "replaced" if site.fallback is None else "fallback"
    name = words.module(group) or site.record.name
    anchors = "".join(f'<a id="site-{number}"></a>' for number, _ in group)
    names = ", ".join(member.record.name for _, member in group)
    head = f"<h2>{words.numbers(group)}. {escape(name)}</h2><span class='tag {status}'>{status}</span>"
    parts = [
        f"{anchors}<div class=head>{head}<span class=soft>{escape(names)}</span></div>",
        html.facts((label, html.words(text)) for label, text in words.facts(group)),
        extra,
    ]
    able, not_able = words.candidates(site)
    if able:
        rows = [
            (
                words.microseconds(c.predicted_us), "" if c.critical_path is None else f"{c.critical_path:.0f}",
                escape(c.kernel), escape(c.schedule or ""), escape(words.tiles(c)), html.words(c.why),
            )
            for c in able
        ]  # fmt: skip
        header = (">µs", ">path", "kernel", "schedule", "tiles", "why")
        listed = html.table(header, rows, (i for i, c in enumerate(able) if c.chosen))
        cannot = f'<p class="legend">Cannot run: {html.words(not_able)}</p>' if not_able else ""
        parts.append(html.details(f"{len(able)} candidates", listed + cannot))
    elif not_able:
        parts.append(f'<p class="legend">Cannot run: {html.words(not_able)}</p>')
    return f"<section class=card>{''.join(parts)}</section>"
