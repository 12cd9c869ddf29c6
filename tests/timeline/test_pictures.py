"""Pictures of timelines: every format says what the timeline says, and the figures of the docs are current."""

from __future__ import annotations

import json
import re
import struct
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from dash_inductor.errors import ArgumentError, MissingPackageError
from dash_inductor.model.mask import Band
from dash_inductor.schedule.simulator import Costs
from dash_inductor.schedule.walk import Problem
from dash_inductor.timeline import files, style
from dash_inductor.timeline.chrome import chrome
from dash_inductor.timeline.html import html
from dash_inductor.timeline.model import MICROSECONDS, Picture
from dash_inductor.timeline.simulated import timeline
from dash_inductor.timeline.svg import svg
from tools import figures

CAUSAL = Band(0)
SVG = "{http://www.w3.org/2000/svg}"


def picture(tiles: int = 4, workers: int = 4, depth: int = 0, heads: int = 2) -> Picture:
    problem = Problem(CAUSAL, tiles, tiles, 1, 1, heads=heads)
    runs = tuple(timeline(name, problem, workers, Costs(1.0, 0.5, depth=depth)) for name in ("ascending", "spt"))
    return Picture("A <title> & more", "a subtitle", runs, ("name", "why"), (("spt", "it is </script> shorter"),))


def rectangles(text: str) -> list[ElementTree.Element]:
    return [e for e in ElementTree.fromstring(text).iter(f"{SVG}rect") if e.find(f"{SVG}title") is not None]


def test_figures_of_the_docs_are_current() -> None:
    found = {path.name: path.read_text(encoding="utf-8") for path in figures.FIGURES.glob("schedules_*")}
    assert found == figures.figures(), "run python tools/figures.py"


def test_svg_has_a_rectangle_for_every_bar() -> None:
    found = picture()
    boxes = rectangles(svg(found))
    assert len(boxes) == sum(len(run.bars) for run in found.timelines)
    titles = [str(box.findtext(f"{SVG}title")) for box in boxes]
    assert "head 0, kv tile 3, q tile 3, rank 3\nwaits for its turn: 1 to 7" in titles
    assert "head 0, kv tile 3, q tile 3, rank 3\nadds its dQ tile: 7 to 7.5" in titles
    # The widths are the times, on one scale for all panels.
    scales = {
        round(float(box.get("width", "")) / (float(end) - float(begin)), 0)
        for box, title in zip(boxes, titles, strict=True)
        for begin, end in re.findall(r": ([\d.]+) to ([\d.]+)", title)
        if float(end) - float(begin) >= 3
    }
    assert len(scales) == 1


def test_colours_are_q_tiles_where_there_are_colours_enough() -> None:
    assert style.Colours.of(picture(8)).meaning == "q tile 0 to 7"
    colours = style.Colours.of(found := picture(9))
    assert colours.meaning == "kv tile 0 to 8"
    assert {colours(step) for run in found.timelines for step in run.steps} == set(range(8))


def test_a_still_picture_of_many_bars_shows_what_takes_most_of_the_time() -> None:
    found = picture(48, 16, heads=4)
    run = found.timelines[0]
    assert len(run.bars) > style.MOST_BARS
    drawn = list(style.rectangles(run, style.Colours.of(found), 2000, True))
    assert {box.step for box in drawn} == {-1}
    for kind in ("wait", "compute"):
        share = sum(box.end - box.begin for box in drawn if box.kind == kind) / run.end / 16
        assert share == pytest.approx(run.shares[kind], abs=0.02)
    ends: dict[int, float] = {}
    for box in sorted(drawn, key=lambda box: box.begin):
        assert box.begin >= ends.get(box.lane, 0.0) - 1e-9
        ends[box.lane] = box.end


def check_trace(trace: dict[str, Any]) -> None:
    """Chrome's trace event format, JSON object form, as far as it is used: metadata and complete events."""
    assert set(trace) <= {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    free: dict[tuple[int, int], float] = {}
    named = set()
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "process_sort_index")
            assert list(event["args"]) == (["sort_index"] if event["name"] == "process_sort_index" else ["name"])
            if event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
        else:
            assert event["ph"] == "X"
            assert set(event) == {"ph", "pid", "tid", "name", "cat", "ts", "dur", "args"}
            assert event["dur"] >= 0
            key = event["pid"], event["tid"]
            assert event["ts"] >= free.get(key, 0.0) - 1e-3  # events of a thread may nest, but not overlap
            free[key] = event["ts"] + event["dur"]
    assert free
    assert set(free) <= named


@pytest.mark.parametrize("depth", [0, 2])
def test_chrome_trace(depth: int) -> None:
    found = picture(12, 5, depth)
    trace = json.loads(json.dumps(chrome(found)))
    check_trace(trace)
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == sum(len(run.bars) for run in found.timelines)
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(found.end)
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert all("one unit is shown as 1 µs" in name for name in names)
    in_time = Picture("", "", tuple(run.in_unit(MICROSECONDS, 2.0) for run in found.timelines))
    assert "one unit" not in json.dumps(chrome(in_time))


def test_the_check_of_traces_finds_faults() -> None:
    """Negative control."""
    for change in ({"dur": -1.0}, {"ts": 0.0}, {"ph": "B"}, {"tid": 99}):
        trace = chrome(picture())
        trace["traceEvents"][-1].update(change)
        with pytest.raises(AssertionError):
            check_trace(trace)


def page_data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_page_holds_all_steps_and_asks_nobody() -> None:
    found = picture(depth=2)
    page = html(found)
    data = page_data(page)
    assert data["title"] == "A <title> & more"
    assert data["rows"] == [["spt", "it is </script> shorter"]]
    for run, given in zip(found.timelines, data["timelines"], strict=True):
        assert len(given["steps"]) == 10 * len(run.steps)
        last = given["steps"][-10:]
        assert tuple(last[:6]) == run.steps[-1][:6]
        assert sum(last[6:]) / 1e6 * found.end == pytest.approx(run.steps[-1].written, abs=1e-4)
        assert len(given["waits"]) == 4 * sum(bar.kind == "wait" for bar in run.bars)
    assert not re.findall(r"https?:|//[a-z]|src=|href=|@import|url\(", page)
    assert "default-src 'none'" in page


def test_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files.write(picture(), path := tmp_path / "picture.png")
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height > 500) == (1800, True)


def test_png_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match=r"PNG pictures need matplotlib.*python -m pip install matplotlib"):
        files.write(picture(), tmp_path / "picture.png")


def test_files_by_suffix(tmp_path: Path) -> None:
    found = picture()
    for suffix, start in ((".svg", "<svg"), (".html", "<!doctype html>"), (".json", '{"traceEvents"'), (".txt", "asc")):
        files.write(found, path := tmp_path / f"picture{suffix}")
        assert path.read_text(encoding="utf-8").startswith(start)
    for path, allowed in ((tmp_path / "picture.gif", r"\.html"), (tmp_path / "none" / "a.svg", "folder that exists")):
        with pytest.raises(ArgumentError, match=allowed):
            files.write(found, path)
