"""Writes the folder and the page of one graph."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from ...records.records import GraphRecord
from ...timeline.files import SUFFIXES
from .. import html
from .. import page as explanation_page
from .. import text as explanation_text
from ..explained import SiteExplanation
from ..explanation import Explanation
from . import files, kernels, schedule
from .dot import dot
from .snapshot import Snapshot

DIFF_LINES = 400
"""The maximum number of lines of a diff on a page; the file contains all of them."""


@dataclass
class GraphPage:
    """The HTML page about one compiled graph, and the files that it links to.

    Args:
        folder: the folder of the graph.
        record: the records of the graph's sites.
        arch: the architecture for which sites are explained; None for that of the tensors' device.
        texts: texts by file name: the graph before and after the pass, and their difference.
        before, after: the graph before and after the pass.
        code: Inductor's generated code by "forward", "backward" or "inference".
    """

    folder: Path
    record: GraphRecord
    arch: str | None
    texts: dict[str, str]
    before: Snapshot
    after: Snapshot
    code: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.explanation = Explanation.of([self.record], self.arch)
        self.extras: dict[int, str] = {}

    def write(self) -> None:
        """Writes the page and all files of its graph to the folder."""
        for name, text in self.texts.items():
            files.write(self.folder / name, text)
        files.write(self.folder / "sites.json", json.dumps(self.explanation.to_dict(), indent=2) + "\n")
        self._write_index()  # write the page first, in case something below fails
        for group in explanation_text.grouped(self.explanation):
            (number, site), *others = group
            places = self._places(number, site, others)
            self.extras[number] = places + self._schedule(number, site) + self._kernels(number, site)
        self._write_index()

    def add_code(self, kind: str, code: str) -> None:
        """Adds generated code; a number is appended to `kind` if there is already code of that kind."""
        name, number = kind, 1
        while name in self.code:
            number += 1
            name = f"{kind}_{number}"
        self.code[name] = code
        files.write(self.folder / f"{name}.py", code)
        self._write_index()

    def _write_index(self) -> None:
        links = [*self.texts, "sites.json", *(f"{name}.py" for name in self.code)]
        listed = "".join(f'<a href="{name}">{name}</a>' for name in links)
        lines = self.texts["joint.diff"].count("\n")
        if lines == 0:
            changed = '<p class="soft">The pass changed nothing.</p>'
        else:
            shown = "\n".join(self.texts["joint.diff"].splitlines()[:DIFF_LINES])
            title = f"what the pass changed: {lines} lines" + (
                f", the first {DIFF_LINES}" if lines > DIFF_LINES else ""
            )
            changed = html.details(title, html.diff(shown))
        code = "" if self.code else '<p class="soft">No code was generated yet, or it came from elsewhere.</p>'
        body = [
            f'<div class="links">{listed}</div>{code}{changed}',
            *explanation_page.body(self.explanation, lambda number: self.extras.get(number, "")),
        ]
        name = f"graph {self.record.compile_id}" if self.record.compile_id else self.folder.name
        title = f"{name}: {explanation_text.headline(self.explanation)}"
        trail = '<a href="../../index.html">runs</a> / <a href="../index.html">graphs</a>'
        files.write(self.folder / "index.html", html.page(title, body, trail))

    def _places(self, number: int, site: SiteExplanation, others: explanation_text.Group) -> str:
        """Writes the neighbourhoods of a group of equal sites, and returns HTML that shows the first one."""
        graphs = self._neighbourhoods(number, site)
        figures = "".join(_figure(f"{when} the pass", [file], text) for when, file, text in graphs)
        links = [_link(file) for other in others for _, file, _ in self._neighbourhoods(*other)]
        more = f'<p class="links legend">{"".join(links)}</p>' if links else ""
        legend = '<p class="legend">Graphviz draws these files: <code>dot -Tsvg -O FILE</code></p>'
        content = f'<div class="figures">{figures}</div>{legend}{more}'
        return html.details("where it is in the graph", content, opened=True)

    def _neighbourhoods(self, number: int, site: SiteExplanation) -> Iterator[tuple[str, str, str]]:
        """Writes a site's neighbourhood before and, if it was replaced, after the pass; yields (when, file, text)."""
        name = site.record.name
        graphs = {"before": self.before, "after": self.after}
        if site.record.status == "fallback":
            del graphs["after"]  # the pass did not change it
        for when, graph in graphs.items():
            centres = graph.of_site(name)
            text = dot(graph, graph.around(centres), centres, f"{name}, {when} the pass")
            file = f"site_{number}_{when}.dot"
            files.write(self.folder / file, text)
            yield when, file, text

    def _schedule(self, number: int, site: SiteExplanation) -> str:
        """Writes the timeline of the chosen schedule, and returns HTML that shows it as text."""
        if site.plan is None or site.site is None:
            return ""
        picture = schedule.picture(site.site, site.arch, site.plan)
        texts = {f"site_{number}_schedule{suffix}": SUFFIXES[suffix](picture).decode() for suffix in (".txt", ".json")}
        for file, text in texts.items():
            files.write(self.folder / file, text)
        legend = (
            f'<p class="legend">{escape(picture.title)}. {escape(picture.subtitle)} A worker computes for the head of '
            "the letter, waits for its semaphore (.), or adds its dQ tile (+). Perfetto opens the trace.</p>"
        )
        figure = _figure("workers over time, as text and as a trace", list(texts), next(iter(texts.values())))
        return html.details(f"the schedule {site.plan.schedule}", figure + legend)

    def _kernels(self, number: int, site: SiteExplanation) -> str:
        """Compiles the kernels and writes their texts; returns HTML about them, or about the error if that fails."""
        plan, facts = site.plan, site.site
        if plan is None or facts is None:
            return ""
        try:
            found = kernels.built(facts, plan, site.arch)
        except Exception as error:
            return f'<p class="note">The kernels do not compile: {escape(f"{type(error).__name__}: {error}"[:400])}</p>'
        if not found:
            return (
                '<p class="soft">The reference runs operators of PyTorch: there are no kernels of its own. With '
                "<code>dash-inductor dump --arch sm_90</code> those of a GPU are compiled.</p>"
            )
        folder = self.folder / "kernels" / f"site_{number}"
        folder.mkdir(parents=True)
        rows = []
        for place, kernel in enumerate(found, start=1):
            links = []
            for kind, ending in kernels.TEXTS.items():
                file = f"{place}_{kernel.of}_{kernel.name}.{ending}"
                files.write(folder / file, kernel.texts[kind])
                links.append(f'<a href="kernels/{folder.name}/{file}">{kind}</a>')
            r = kernel.resources
            numbers = (str(kernel.warps), str(r.registers), f"{r.spill_stores}/{r.spill_loads}", f"{r.shared_memory}")
            rows.append((escape(kernel.of), escape(kernel.name), *numbers, " ".join(links)))
        header = ("of", "kernel", ">warps", ">registers", ">spilled bytes, stored/loaded", ">shared bytes", "texts")
        note = ""
        if any(map(kernels.is_rendered, (plan.kernel, plan.forward))):
            note = (
                '<p class="legend">Portable kernels are compiled here as for contiguous tensors of nominal or known '
                "sizes; the code that runs is Inductor's.</p>"
            )
        return f"<h3>Kernels on {escape(site.arch)}</h3>" + html.table(header, rows) + note


def _figure(caption: str, names: Sequence[str], text: str) -> str:
    """An HTML figure with a text and links to the files that contain it."""
    named = f"<figcaption>{caption}: {' '.join(map(_link, names))}</figcaption>"
    return f"<figure>{named}<pre>{escape(text)}</pre></figure>"


def _link(file: str) -> str:
    return f'<a href="{file}">{file}</a>'
