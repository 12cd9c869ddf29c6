"""The HTML pages that list the graphs of one run, and all runs."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from .. import html
from .graph_page import GraphPage


def graphs(run: str, pages: Sequence[GraphPage]) -> str:
    """Returns the HTML page that lists the graphs of one run (process)."""
    rows = []
    for page in pages:
        sites = page.explanation.sites
        fallback = [site.fallback.reason.value for site in sites if site.fallback is not None]
        rows.append(
            (
                f'<a href="{page.folder.name}/index.html">{escape(page.record.compile_id or page.folder.name)}</a>',
                escape(page.record.kind), str(len(sites)), str(len(sites) - len(fallback)),
                escape(", ".join(dict.fromkeys(fallback))),
                escape(", ".join(dict.fromkeys(site.record.module for site in sites if site.record.module)))[:200],
            )
        )  # fmt: skip
    header = ("graph", "kind", ">attention sites", ">replaced", "not replaced because of", "modules")
    trail = '<a href="../index.html">runs</a>'
    return html.page(f"{len(pages)} graph{'s' * (len(pages) != 1)} of {run}", [html.table(header, rows)], trail)


def runs(folder: Path) -> str:
    """Returns the HTML page that lists all runs in a dump folder."""
    found = sorted(path.parent for path in folder.glob("*/index.html"))
    rows = [
        (f'<a href="{run.name}/index.html">{escape(run.name)}</a>', str(len(list(run.glob("*/index.html")))))
        for run in found
    ]
    return html.page(
        f"Compiled graphs: {len(rows)} run{'s' * (len(rows) != 1)}", [html.table(("run", ">graphs"), rows)]
    )
