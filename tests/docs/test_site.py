"""The site of documentation: every page is in its navigation, what pages include exists, pictures are up to date."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from ..support.distribution import ROOT

DOCS = ROOT / "docs"
SITE = runpy.run_path(str(ROOT / "tools" / "docs_site.py"))
FIGURES = runpy.run_path(str(ROOT / "tools" / "docs_figures.py"))
FOLDERS = (DOCS, ROOT / "guard" / "docs")
PAGES = sorted(page for folder in FOLDERS for page in folder.rglob("*.md"))


def test_every_page_is_in_the_navigation_once() -> None:
    listed = re.findall(r"[\w/-]+\.md$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(
        page.relative_to(folder).as_posix() for folder in FOLDERS for page in folder.rglob("*.md")
    )


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_are_filled(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    shown = SITE["on_page_markdown"](text)
    assert "<!-- include" not in shown
    assert "<!-- snippet" not in shown
    assert len(shown.splitlines()) >= 10
    local = re.findall(r"\]\(([^):#]+)[^):]*\)", SITE["filled"](text))
    assert not [target for target in local if not (page.parent / target).exists()]


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


@pytest.mark.parametrize("name", FIGURES["PICTURES"])
def test_pictures_are_up_to_date(name: str) -> None:
    """If this fails, run ``python tools/docs_figures.py``."""
    assert (DOCS / "figures" / f"{name}.svg").read_text(encoding="utf-8") == FIGURES["PICTURES"][name]()


def test_the_picture_of_a_walk_has_the_ranks_of_the_schedule() -> None:
    shown = re.findall(r"CTA of kv (\d), dQ tile (\d): rank (\d)", FIGURES["walk"]())
    spans = FIGURES["run_of"]("spt").spans
    assert sorted((int(kv), int(q), int(rank)) for kv, q, rank in shown) == sorted(
        (span.kv, span.accumulator[2], span.rank) for span in spans
    )
    assert len(spans) == 6 * 7 // 2


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
            '<script src="assets/x.js"></script><img src="figures/walk.svg"><img src="data:image/png;base64,AA==">',
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


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CHANGELOG.md", *PAGES], ids=name_of)
def test_lists_are_lists_on_the_site_too(page: Path) -> None:
    assert not misread(page.read_text(encoding="utf-8"))


def test_misread_lists_are_found() -> None:
    assert misread("1. a\n\n   b\n") == ["   b"]
    assert misread("text:\n- a\n- b\n") == ["- a"]
    assert not misread("text:\n\n- a\n  a\n- b\n\n1. c\n\n    d\n")
