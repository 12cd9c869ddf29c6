"""The report of a folder: text, JSON and a page; and folders that anybody may have written."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dash_guard.cli import main
from dash_guard.errors import RecordingError
from dash_guard.report import page, pictures, report
from dash_guard.report.entries import entries
from dash_guard.report.findings import Finding, FindingsFile

HANG = Finding(
    "hang",
    "confirmed",
    "rank 1 has not entered all_reduce 8 of group 0",
    "Look at its stack there",
    ranks=(1,),
    step=9,
    collective="all_reduce 8 of group 0",
    evidence={"waits": [[0, 1, "all_reduce 8 of group 0"], [2, 1, "all_reduce 8 of group 0"]]},
    hosts=("node1",),
    time=1.7e9,
    latency_s=3.5,
)
SLOW = Finding(
    "slow", "suspect", "rank 2 is slow", ranks=(2,), step=20, evidence={"steps": [[19, 5.0, 30.0], [20, 6.5, 31.0]]}
)
COVERAGE = {"slow": {"counts": {"steps": 12}, "unseen": {"not sampled": 3}}}


def folder_of(path: Path, *findings: Finding) -> Path:
    for finding in findings:
        FindingsFile(path).add(finding)
    path.mkdir(exist_ok=True)
    of_monitor = {"v": 1, "world": 4, "joined": 3, "checks": COVERAGE}
    (path / "coverage.json").write_text(json.dumps(of_monitor), encoding="utf-8")
    (path / "coverage-rank00002.json").write_text(json.dumps(COVERAGE), encoding="utf-8")
    return path


def test_text_json_and_page_say_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, html = folder_of(tmp_path / "guard", HANG, SLOW), tmp_path / "page.html"
    assert main(["report", str(folder), "--html", str(html)]) == 1
    text = capsys.readouterr().out
    for part in (
        "1 confirmed, 1 suspect",
        "3 of 4 ranks",
        "step 9: rank 1 has not",
        "node1",
        "3.5 s",
        "24 steps",
        "6 times",
    ):
        assert part in text
    assert main(["report", str(folder), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [finding["kind"] for finding in found["findings"]] == ["hang", "slow"]
    assert found["coverage"]["slow"]["counts"] == {"steps": 24}
    content = html.read_text(encoding="utf-8")
    assert content.count("<svg") == 2 + 4  # two pictures, with two keys each
    for meaning in (
        "the rank that others wait for", "for whom", "the median time of the other ranks", "how much later this rank",
        "confirmed: two independent", "suspect: one fact",
    ):  # fmt: skip
        assert meaning in content
    assert "note: worth knowing" not in content  # there is none
    assert "<td></td>" not in content
    assert "who waits for whom" in content
    assert "+6.5 ms" in content
    assert not re.search(r"(src|href)=|url\((?!#)|@import", content)
    HTMLParser().feed(content)
    assert main(["report", str(folder), "--pictures", str(tmp_path / "pictures")]) == 1
    capsys.readouterr()
    images = sorted((tmp_path / "pictures").iterdir())
    assert [image.name for image in images] == ["1-hang.svg", "2-slow.svg"]
    for image in images:
        HTMLParser().feed(image.read_text(encoding="utf-8"))
        assert ".edge {" in image.read_text(encoding="utf-8")
    nothing = folder_of(tmp_path / "nothing")
    assert main(["report", str(nothing)]) == 0
    assert "nothing was found" in capsys.readouterr().out


def write(folder: Path, name: str, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    return folder


LINE = HANG.to_json().encode()
CRAFTED: dict[str, tuple[str, bytes]] = {
    "no JSON": ("findings.jsonl", b"{"),
    "a pickle": ("findings.jsonl", b"\x80\x04K\x01."),
    "another version": ("findings.jsonl", LINE.replace(b'"v":1', b'"v":9')),
    "an unknown kind": ("findings.jsonl", LINE.replace(b'"hang"', b'"gone"', 1)),
    "a rank beyond all": ("findings.jsonl", LINE.replace(b'"ranks":[1]', b'"ranks":[9999999999]')),
    "NaN": ("findings.jsonl", LINE.replace(b"3.5", b"NaN")),
    "a long line": ("findings.jsonl", LINE.replace(b"node1", b"x" * 70_000)),
    "deep": ("findings.jsonl", b"[" * 10_000),
    "coverage is a list": ("coverage.json", b"[]"),
    "coverage counts texts": ("coverage.json", b'{"v":1,"world":1,"joined":1,"checks":{"a":{"counts":{"b":"c"}}}}'),
    "coverage is negative": ("coverage.json", b'{"v":1,"world":-1,"joined":1,"checks":{}}'),
    "coverage of a rank is odd": ("coverage-rank00000.json", b'{"a":{"counts":[],"other":{}}}'),
    "coverage is large": ("coverage.json", b" " * (5 << 20)),
}


@pytest.mark.parametrize("kind", CRAFTED)
def test_crafted_files_are_refused_in_words(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "guard", *CRAFTED[kind])
    assert main(["report", str(folder)]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert len(said) < 1000


def test_what_is_no_folder_of_a_guard_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    os.mkfifo(write(tmp_path / "fifo", "x", b"") / "coverage.json")
    for name in ("absent", "empty", "fifo"):
        with pytest.raises(RecordingError):
            report.load(tmp_path / name)


def test_control_characters_and_markup_are_escaped(tmp_path: Path) -> None:
    evil = "\x1b[2J<script>alert(1)</script>\u202e"
    evidence: dict[str, Any] = {"waits": [[0, 1, evil], ["a", 1, "x"], [0], None, [0, 1 << 40, "x"]]}
    hang = Finding("hang", "confirmed", evil, ranks=(1,), tensor=evil, hosts=(evil,), evidence=evidence)
    slow = Finding("slow", "suspect", evil, ranks=(1,), evidence={"steps": [[1, "x", 2], [1, 1e300, 1], evil]})
    found = report.load(folder_of(tmp_path / "guard", hang, slow))
    text, html = report.text(found), page.html(found)
    assert all(line.isprintable() for line in text.split("\n"))
    assert "<script" not in html
    assert "\x1b" not in html
    assert "\u202e" not in html
    assert pictures.of(found.findings[1]) == ""
    assert pictures.of(found.findings[0]).count("<circle") == 2


def fact(kind: Any, severity: Any, ranks: tuple[int, ...] = (1,), **more: Any) -> Finding:
    return Finding(kind, severity, f"{kind} of {ranks} is {severity}", ranks=ranks, **more)


HUNG = {"collective": "all_reduce 8 of group 0", "step": 9}


@pytest.mark.parametrize(
    ("findings", "shown"),
    [
        ([fact("hang", "note", **HUNG), fact("hang", "suspect", **HUNG), fact("hang", "confirmed", **HUNG)], [(2, 2)]),
        ([fact("hang", "suspect", **HUNG), fact("hang", "suspect", **HUNG | {"step": 70})], [(0, 0), (1, 0)]),
        ([fact("hang", "suspect", **HUNG), fact("hang", "suspect", (2,), **HUNG)], [(0, 0), (1, 0)]),
        (
            [
                fact("at_rest", "suspect", step=8),
                fact("slow", "suspect", (3,), step=8),
                fact("bits", "suspect", (0, 1), step=9, groups=((0,), (1,))),
                fact("bits", "confirmed", step=8, evidence={"at_rest": "", "bits": ""}),
            ],
            [(3, 2), (1, 0)],
        ),
        (
            [fact("at_rest", "suspect", step=8), fact("bits", "confirmed", step=900, evidence={"at_rest": ""})],
            [(1, 0), (0, 0)],
        ),
        ([fact("data", "note"), fact("slow", "suspect", step=4), fact("dead", "confirmed")], [(2, 0), (1, 0), (0, 0)]),
    ],
    ids=["updated", "later", "other rank", "combined", "far apart", "the verdict first"],
)  # fmt: skip
def test_a_report_has_one_entry_for_each_thing(findings: list[Finding], shown: list[tuple[int, int]]) -> None:
    found = entries(findings)
    assert [(findings.index(entry.finding), len(entry.before)) for entry in found] == shown
    content = report.text(report.Report("x", tuple(findings), {}, 4, 4))
    said = [finding.sentence for finding in findings]
    assert all(content.count(sentence) == said.count(sentence) for sentence in said)
