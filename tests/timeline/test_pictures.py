"""Pictures of timelines: every format says what the timeline says."""

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
from dash_inductor.schedule.tile_schedule import Problem
from dash_inductor.timeline import files, style
from dash_inductor.timeline.chrome import chrome
from dash_inductor.timeline.image import figure, image
from dash_inductor.timeline.model import MICROSECONDS, Picture
from dash_inductor.timeline.simulated import timeline

CAUSAL = Band(0)
SVG = "{http://www.w3.org/2000/svg}"


def picture(tiles: int = 4, workers: int = 4, depth: int = 0, heads: int = 2) -> Picture:
    problem = Problem(CAUSAL, tiles, tiles, 1, 1, heads=heads)
    runs = tuple(timeline(name, problem, workers, Costs(1.0, 0.5, depth=depth)) for name in ("ascending", "spt"))
    return Picture("A <title> & more", "a subtitle", runs)


def boxes(axes: Any) -> list[tuple[float, float]]:
    """Begin and end of every bar that is drawn."""
    pytest.importorskip("matplotlib")
    from matplotlib.patches import PathPatch

    paths = [patch.get_path().vertices.reshape(-1, 5, 2) for patch in axes.patches if isinstance(patch, PathPatch)]
    return sorted((min(x), max(x)) for path in paths for x in path[..., 0].tolist())


@pytest.mark.parametrize("depth", [0, 2])
def test_an_image_has_a_rectangle_for_every_bar(depth: int) -> None:
    """Where it begins and ends, on one scale for all panels."""
    pytest.importorskip("matplotlib")
    found = picture(depth=depth)
    axes = figure(found).axes
    assert len({ax.get_xlim() for ax in axes}) == 1
    for ax, run in zip(axes, found.timelines, strict=True):
        assert boxes(ax) == sorted((bar.begin, bar.end) for bar in run.bars)
        bars = sum(bar.kind == "compute" for bar in run.bars)
        assert sum(bool(re.fullmatch(r"[ab][0-3]", text.get_text())) for text in ax.texts) == bars


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


def test_svg_is_the_same_every_time(tmp_path: Path) -> None:
    """Whatever the program has set matplotlib to, and without the date; text stays text, as it is."""
    matplotlib = pytest.importorskip("matplotlib")
    names = Picture("A <title> & $x^2$", "a subtitle", picture().timelines)
    first = image(names, "svg")
    with matplotlib.rc_context({"svg.hashsalt": "other", "svg.fonttype": "path", "font.sans-serif": ["Arial"]}):
        assert image(names, "svg") == first
    texts = {text.text for text in ElementTree.fromstring(first).iter(f"{SVG}text")}
    assert {"A <title> & $x^2$", "a subtitle", "a0", "waits for its semaphore"} <= texts
    assert b"<dc:date>" not in first


def test_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files.write(picture(), path := tmp_path / "picture.png")
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height > 500) == (1800, True)


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_images_without_matplotlib(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        MissingPackageError, match=r'need matplotlib.*python -m pip install "dash-inductor\[pictures\]"'
    ):
        files.write(picture(), path := tmp_path / f"picture{suffix}")
    assert not path.exists()


def test_files_by_suffix(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = picture()
    for suffix, start in ((".svg", "<?xml"), (".json", '{"traceEvents"'), (".txt", "asc")):
        files.write(found, path := tmp_path / f"picture{suffix}")
        assert path.read_text(encoding="utf-8").startswith(start)
    for path, allowed in ((tmp_path / "picture.html", r"\.svg"), (tmp_path / "none" / "a.svg", "folder that exists")):
        with pytest.raises(ArgumentError, match=allowed):
            files.write(found, path)
