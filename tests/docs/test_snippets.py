"""Every snippet of the documentation does what it shows: it is run, or checked where running it needs a GPU or long."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..support.snippets import ROOT, Page, Snippet, check, same, snippets

FILES = [path for folder in ("docs", "guard/docs") for path in sorted((ROOT / folder).glob("*.md"))]
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in FILES}
NEEDED = {"diffusers": "diffusers"}
"""Packages without which the snippets of a page do not run; one environment alone has them."""
WITH_SNIPPETS = [name for name, page in PAGES.items() if "\n```" in page]


@pytest.mark.parametrize("name", WITH_SNIPPETS)
def test_snippets(name: str, tmp_path: Path) -> None:
    if name in NEEDED:
        pytest.importorskip(NEEDED[name], reason="one environment alone has the tools that integrations join")
    go_through(name, Page(name, tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in WITH_SNIPPETS if "<!-- snippet: full" in PAGES[name]])
def test_snippets_that_take_long(name: str, tmp_path: Path) -> None:
    go_through(name, Page(name, tmp_path, full=True))


def go_through(name: str, page: Page) -> None:
    for snippet in snippets(PAGES[name]):
        try:
            page.go(snippet)
        except Exception as error:
            raise AssertionError(f"{name}.md, line {snippet.line}: {error}") from error


@pytest.mark.parametrize(
    "block",
    [
        "```python\npass\n```\n",  # no verdict
        "<!-- snippet: run -->\n\n```python\npass\n```\n",  # a verdict of nothing
        "<!-- snippet: output -->\n```python\npass\n```\n",
        "<!-- snippet: diagram -->\n```console\n$ ls\n```\n",
        "```\nls\n```\n",  # no language
    ],
)
def test_snippets_without_a_verdict_are_found(block: str) -> None:
    with pytest.raises(ValueError, match=r"line .*verdict=.* is not allowed"):
        snippets(block)


@pytest.mark.parametrize(
    "command",
    [
        "rm -rf build",
        "make tests",
        "make test SPEED=2",
        "pip install dash",
        "DASH_INDUCTOR_CPU=fast python train.py",
        "DASH_INDUCTOR=maybe python train.py",
        "DASH_BENCHMARK_FA9=lib.so python train.py",
        "python another.py",
        "python -m benchmarks.forward --slow",
        "python -m dash_inductor fly",
        "dash-inductor",
    ],
)
def test_wrong_commands_are_found(command: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(AssertionError):
        check(command, tmp_path)


def test_wrong_snippets_are_found(tmp_path: Path) -> None:
    page = Page("page", tmp_path)
    page.go(Snippet("run", "", "python", "print(1)\n", 1))
    page.go(Snippet("output", "", "text", "1\n", 1))
    with pytest.raises(AssertionError):
        page.go(Snippet("output", "", "text", "2\n", 1))
    with pytest.raises(NameError):
        page.go(Snippet("run", "", "python", "unknown\n", 1))
    with pytest.raises(SyntaxError):
        page.go(Snippet("check", "", "python", "1 +\n", 1))
    page.go(Snippet("run", "exit=3", "console", "$ exit 3\n", 1))
    with pytest.raises(AssertionError, match="exit status 3"):
        page.go(Snippet("run", "", "console", "$ exit 3\n", 1))
    with pytest.raises(AssertionError, match="expected"):
        page.go(Snippet("run", "", "console", "$ echo a\nb\n", 1))


def test_expected_output_may_leave_parts_out() -> None:
    same("one two three\nfour\n", "one ... three\nfour\n")
    with pytest.raises(AssertionError):
        same("one two three\nfour\n", "one ... three\n")
