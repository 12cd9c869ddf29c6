"""The site of documentation: every page is in its navigation, what pages include exists, pictures are up to date."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tools import figures

from ..support.distribution import ROOT
from ..support.processes import HANGS

DOCS = ROOT / "docs"
SITE = runpy.run_path(str(ROOT / "tools" / "docs_site.py"))
FOLDERS = (DOCS, ROOT / "guard" / "docs")
PAGES = sorted(page for folder in FOLDERS for page in folder.glob("*.md"))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LOG = sorted((DOCS / "log").glob("*.md"))


def test_every_page_is_in_the_navigation_once() -> None:
    listed = re.findall(r"[\w/-]+\.md$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in PAGES)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_are_filled(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    shown = SITE["on_page_markdown"](text)
    assert "<!-- include" not in shown
    assert "<!-- snippet" not in shown
    assert len(shown.splitlines()) >= 10
    assert "](log/" not in shown
    local = re.findall(r"\]\(([^):#]+)[^):]*\)", SITE["filled"](text))
    assert not [target for target in local if not (page.parent / target).exists()]


BUILT = ROOT / "build" / "site"


@pytest.mark.skipif(
    CHROMIUM is None or not BUILT.exists(), reason="needs chromium, and the site that `make docs` builds"
)
def test_search_works_from_a_folder() -> None:
    """Browsers start no worker there (`docs/iframe-worker.js`)."""
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=60000",
        "--dump-dom",
    ]
    page = f"{(BUILT / 'index.html').as_uri()}?q=logsumexp"
    seen = subprocess.run([*command, page], capture_output=True, text=True, check=True, timeout=HANGS).stdout
    assert re.search(r'"md-search-result__meta">\d+ matching documents', seen)


def test_included_text_is_that_of_its_heading() -> None:
    shown = SITE["filled"]("above\n<!-- include: README.md#training-step -->\nbelow\n")
    assert shown.startswith("above\n")
    assert shown.endswith("\nbelow\n")
    assert "| ms a step | PyTorch's default |" in shown
    assert "## Settings" not in shown
    assert "blob/main/docs/" not in SITE["filled"]("<!-- include: README.md#what-is-replaced -->\n")


def test_a_comment_in_code_is_no_heading() -> None:
    text = "# A\n```console\n# B\n```\nend\n# C\n"
    assert SITE["section"](text, "a") == "```console\n# B\n```\nend\n"
    with pytest.raises(ValueError, match="anchor='b' is not allowed: 0 headings"):
        SITE["section"](text, "b")
    with pytest.raises(ValueError, match="anchor='a' is not allowed: 2 headings"):
        SITE["section"](text + "## A\n", "a")


@pytest.mark.parametrize("name", figures.PICTURES)
def test_pictures_are_up_to_date(name: str) -> None:
    """What is drawn, whatever the version of matplotlib.  If this fails, run ``python -m tools.figures``."""
    pytest.importorskip("matplotlib")
    path = DOCS / "figures" / f"{name}.png"
    assert figures.digest_of(path) == figures.digest(figures.draw(name))
    assert path.stat().st_size < 150_000


def test_a_picture_of_something_else_is_out_of_date() -> None:
    """Negative control: another number, another text, another bar."""
    pytest.importorskip("matplotlib")
    for change in (
        lambda ax: ax.texts[0].set_text("9"),
        lambda ax: ax.set_title("another", loc="left"),
        lambda ax: ax.patches[0].set_width(0.5),
    ):
        found = figures.draw("tile_schedule")
        before = figures.digest(found)
        change(found.axes[0])
        assert figures.digest(found) != before


def test_the_picture_of_a_tile_schedule_has_the_ranks_of_the_schedule() -> None:
    pytest.importorskip("matplotlib")
    ranks = next(ax for ax in figures.draw("tile_schedule").axes if ax.get_title("left") == "Ranks under spt")
    kv = [int(label.get_text().split()[-1]) for label in ranks.get_yticklabels()]
    shown = [(kv[round(text.get_position()[1])], text.get_position()[0], int(text.get_text())) for text in ranks.texts]
    spans = figures.run_of("spt").spans
    assert sorted(shown) == sorted((span.kv, span.accumulator[2], span.rank) for span in spans)
    assert len(spans) == 6 * 7 // 2


def test_the_pictures_of_results_have_their_numbers() -> None:
    pytest.importorskip("matplotlib")
    full, causal = figures.draw("backward").axes
    for ax, mask in ((full, "full"), (causal, "causal")):
        rows = {row["shape"]: row for row in figures._results("backward_h100")["rows"]}
        drawn = [patch.get_height() for patch in ax.patches]
        assert len(drawn) == 4 * 5
        assert {rows[f"regular:d128:{mask}:b16h16:s1024"][name] for name in figures.CONTENDERS} <= set(drawn)
    (steps,) = figures.draw("steps").axes
    measured = figures.result_tables.measured_steps()
    shares = [patch.get_width() for patch in steps.patches]
    assert all(one["dash"]["ms"] / one["default"]["ms"] in shares for one in measured.values())


@pytest.mark.parametrize(
    ("page", "asks"),
    [
        ('<script src="https://cdn.example/x.js"></script>', True),
        ("<script async src=//cdn.example/x.js></script>", True),
        ('<img src="http://example.org/x.png">', True),
        ('<link rel="stylesheet" href="https://fonts.example/x.css">', True),
        ('<style>@import url("https://fonts.example/x.css")</style>', True),
        ("p { background: url(//example.org/x.png) }", True),
        (
            '<script src="assets/x.js"></script><img src="figures/steps.png"><img src="data:image/png;base64,AA==">',
            False,
        ),
        ('<a href="https://example.org">a link</a><link rel="canonical" href="https://example.org/">', False),
        ('<svg xmlns="http://www.w3.org/2000/svg"></svg>', False),
    ],
)
def test_requests_to_other_hosts_are_found(page: str, asks: bool, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    suffix = "css" if page.startswith("p {") else "html"
    (tmp_path / "folder" / f"page.{suffix}").write_text(page, encoding="utf-8")
    config: dict[str, Any] = {"site_dir": str(tmp_path)}
    if asks:
        with pytest.raises(ValueError, match=r"pages ask other hosts: .*folder/page\."):
            SITE["on_post_build"](config)
    else:
        SITE["on_post_build"](config)


def misread(markdown: str) -> list[str]:
    """Lines that GitHub reads as parts of lists and Python-Markdown, which makes the site, does not."""
    lines = re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL).splitlines()
    item = re.compile(r"(?:[-*+]|\d{1,2}\.) ")
    found = []
    for above, line in zip(["", *lines], lines, strict=False):
        late = not above and re.match(r" {1,3}\S", line)  # a paragraph of an item needs four blanks
        glued = item.match(line) and above and not item.match(above) and not above.startswith((" ", "#"))
        if late or glued:
            found.append(line)
    return found


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CHANGELOG.md", *PAGES, *LOG], ids=name_of)
def test_lists_are_lists_on_the_site_too(page: Path) -> None:
    assert not misread(page.read_text(encoding="utf-8"))


def test_misread_lists_are_found() -> None:
    assert misread("1. a\n\n   b\n") == ["   b"]
    assert misread("text:\n- a\n- b\n") == ["- a"]
    assert not misread("text:\n\n- a\n  a\n- b\n\n1. c\n\n    d\n")
