"""Measured numbers of the documentation are those of a results file, and the text names the GPU."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from ..support.distribution import ROOT
from . import measured
from .measured import Source, blocks, found_in, path_of, problems, rows

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "guard/docs").glob("*.md"))]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_measured_numbers_are_those_of_a_results_file(page: Path) -> None:
    """If this fails, name the results file of a number in a comment (`tests/docs/measured.py` says how), move the
    number to the log, or say in a comment that it is no measurement."""
    assert not list(problems(page.read_text(encoding="utf-8")))


def used() -> list[str]:
    """The results files that pages name in comments and in texts, and that their tables are made of."""
    found: set[str] = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found.update(source.name for block in blocks(text) for joined in block.sources for source in joined)
        found.update(name for name in re.findall(r"(\w+)\.json", text) if path_of(name).exists())
    tool = runpy.run_path(str(ROOT / "tools" / "result_tables.py"))
    read = tool["read"]

    def noted(name: str) -> Any:
        found.add(name)
        return read(name)

    tool["steps"].__globals__["read"] = noted
    for make in tool["TABLES"].values():
        make()
    return sorted(found)


@pytest.mark.parametrize("name", used())
def test_results_files_of_pages_name_their_gpu_and_commit(name: str) -> None:
    assert rows(name)
    assert all(row.gpu and row.commit for row in rows(name))


@pytest.fixture
def file_of_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A results file `few`, of two rows that were measured on an H200."""
    listed = [
        {"shape": "d64:full", "ours": 531.4, "its": 480.0, "step ms": 1.244, "peak GiB": 7.35},
        {"shape": "d64:causal", "ours": 455.0, "its": 500.0, "step ms": 0.622, "peak GiB": 7.25},
    ]
    found = {"conditions": {"gpu": "NVIDIA H200", "commit": "0123456"}, "rows": listed}
    (tmp_path / "few.json").write_text(json.dumps(found), encoding="utf-8")
    (tmp_path / "many.json").write_text(json.dumps(found | {"rows": listed * 20}), encoding="utf-8")
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    monkeypatch.setattr(measured, "rows", rows.__wrapped__)


@pytest.mark.usefixtures("file_of_results")
@pytest.mark.parametrize(
    "block",
    [
        "On an H200 it has 531 and 455. <!-- measured: few -->",
        "On an H200 a step takes 1.24 ms, another one 622 us. <!-- measured: few -->",
        "On an H200 it has 0.91 to 1.11 of its rate. <!-- measured: few: ours / its -->",
        "On an H200: 0.91 to 1.11. <!-- measured: few: ours / its where full + few: ours / its where causal -->",
        "On an H200 up to 9 % slower, up to 11 % faster. <!-- measured: few: ours / its -->",
        "On an H200 up to 2.0 times as fast. <!-- measured: few: step ms / step ms -->",
        "On an H200 it is 9 % slower\nto 11 % faster.\n<!-- measured: few: ours / its -->",
        "On an H200 the first takes 2.0 times as long. <!-- measured: few: step ms / step ms -->",
        "- On an H200: 7.3 GiB. <!-- measured: few: peak * where causal -->\n- nothing",
        "On an H200:\n\n<!-- measured: few: * -->\n\n| a | step, ms | peak, GiB |\n|---|---|---|\n| a | **1.24** | 7 |",
        "On an H200 it takes 1.24 ms of at most 5 ms. <!-- measured: few --> <!-- not measured: 5: a limit -->",
        "It waits 3 s. <!-- not measured: a setting -->",
        "<!-- not measured: settings -->\n\n- It waits 3 s.\n- It waits 4 s.",
        "With torch 2.11 and 8192 tokens at D=64 it has 8 heads, arXiv 2601.21824, 2^16, 16-bit, `5 ms`.",
        "```\n5 ms\n```",
        "<!-- x: written by tools/x.py -->\n\n5 ms\n\n<!-- end of x -->",
    ],
)
def test_numbers_with_a_source(block: str) -> None:
    assert not list(problems(f"# Title\n\n{block}\n"))


@pytest.mark.usefixtures("file_of_results")
@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ("On an H200 it takes 5 ms.", "no source is named for 5 ms"),
        ("It has 0.93 of its rate.", "no source is named for 0.93"),
        ("It gave 531 instead of 480.", "no source is named for 531, 480"),
        ("| what | time, ms |\n|---|---|\n| a | 5 |", "no source is named for 5 ms"),
        ("On an H200 it takes 1.25 ms. <!-- measured: few -->", "1.25 ms: not in few"),
        ("On an H200 it takes 1.24 us. <!-- measured: few -->", "1.24 us: not in few"),
        ("On an H200 it has 1.17 of its rate. <!-- measured: few: ours / its -->", "1.17: not in few"),
        ("On an H200 it has 531. <!-- measured: few: ours where causal -->", "531: not in few"),
        ("On an H200 it has 531. <!-- measured: none -->", "there is no results file none"),
        ("On an H200 it has 531. <!-- measured: few: theirs -->", "nothing is found for few: theirs"),
        ("It has 531. <!-- measured: few -->", "H200: the text does not name this GPU"),
        ("On an H100 it has 531. <!-- measured: few -->", "H200: the text does not name this GPU"),
        (
            "On an H200: 0.91 to 1.11. <!-- measured: few: ours / its where full; few: ours / its where causal -->",
            "0.91 to 1.11: not the smallest and the largest of a source",
        ),
        ("On an H200 up to 622 us. <!-- measured: few: step ms -->", "up to 622 us: not the largest of a source"),
        ("On an H200. <!-- measured: few -->", "it has no number that looks measured"),
        ("<!-- not measured: settings -->\n\n- It waits 3 s.\n\nIt takes 5 ms.", "no source is named for 5 ms"),
        ("It takes 3 s, or 5 s. <!-- not measured: 3: a setting -->", "no source is named for 5 s"),
    ],
)
def test_numbers_without_a_source(block: str, problem: str) -> None:
    (found,) = problems(f"# Title\n\n{block}\n")
    assert re.fullmatch(rf"line \d+: {re.escape(problem)}", found)


@pytest.mark.usefixtures("file_of_results")
def test_files_with_many_numbers_are_named_with_a_column() -> None:
    assert Source("many", "ours").values()
    with pytest.raises(ValueError, match="many: a column must be named, because it has 160 numbers"):
        Source("many").values()


def test_what_looks_measured() -> None:
    text = (
        "takes 20 to 30 us, 1.5 and 2 GiB, 1.2 or 3 times as long, .93 of it, 0.5 in 3 heads, 5 % more, with torch 2.11"
    )
    expected = ["20 us", "30 us", "1.5 GiB", "2 GiB", "1.2 times", "3 times", ".93", "5 %"]
    assert [str(found) for found in found_in(text)] == expected
