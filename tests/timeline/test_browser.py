"""The interactive page in a real browser, headless: it draws, names tile pairs, zooms and switches schedules."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dash_inductor.model.mask import Band
from dash_inductor.schedule.simulator import Costs
from dash_inductor.schedule.walk import Problem
from dash_inductor.timeline.html import html
from dash_inductor.timeline.model import Picture
from dash_inductor.timeline.simulated import timeline

from ..support.processes import HANGS

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install -y chromium")

FRAMES = """<script>requestAnimationFrame = draw => setTimeout(draw, 16);</script>"""
"""In virtual time timers run as soon as nothing else does, but a frame comes when the machine has time for it."""

ACTIONS = """
<script>
const results = document.createElement("pre"), later = () => new Promise(done => setTimeout(done, 300));
const say = text => { results.textContent += text + "\\n"; };
const canvas = document.querySelectorAll("canvas")[0], box = document.querySelector("#chips input");
addEventListener("error", event => say("error " + event.message));
document.body.append(results);
(async () => {
  const area = canvas.getBoundingClientRect(), at = {clientX: area.left + 60, clientY: area.top + 20, bubbles: true};
  say("before " + document.body.dataset.drawn);
  canvas.dispatchEvent(new PointerEvent("pointermove", at));
  say("tip " + document.getElementById("tip").textContent);
  canvas.dispatchEvent(new WheelEvent("wheel", {...at, deltaY: -400, ctrlKey: true}));
  await later();
  say("zoomed " + document.body.dataset.drawn + " " + location.hash);
  box.click();
  say("hidden " + document.querySelector(".panel[hidden]").textContent);
  say("done");
})();
</script></body>"""


def opened(page: Path, fragment: str = "") -> str:
    """The document as the browser has it after a while."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900",
               "--virtual-time-budget=10000", "--dump-dom", f"file://{page}{fragment}"]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=HANGS, check=True).stdout


def picture() -> Picture:
    problem = Problem(Band(0), 4, 4, 1, 1, heads=2)
    runs = tuple(timeline(name, problem, 4, Costs(1.0, 0.5)) for name in ("ascending", "spt"))
    return Picture("Two <schedules>", "a subtitle", runs, ("name", "why"), (("spt", "it is shorter"),))


def test_page_in_a_browser(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    page = html(picture())
    assert page.count("<head>") == page.count("</body>") == 1
    path.write_text(page.replace("<head>", f"<head>{FRAMES}").replace("</body>", ACTIONS), encoding="utf-8")
    found = opened(path)
    results = re.search(r"<pre>(.*?)</pre>", found, re.DOTALL)
    assert results is not None
    said = dict(line.split(" ", 1) for line in results[1].splitlines() if " " in line)
    assert results[1].endswith("done\n")
    assert "error" not in said
    bars = [len(run.bars) for run in picture().timelines]
    assert said["before"] == " ".join(map(str, bars))
    assert said["tip"].startswith("kv tile 0 \u00d7 q tile 0 · head 0computes0 to 1 units (1)")
    zoomed = [int(word) for word in said["zoomed"].split()[:2]]
    assert all(0 < now < before for now, before in zip(zoomed, bars, strict=True))
    assert "#from=0." in said["zoomed"]
    assert said["hidden"].startswith("ascending")
    assert '<h1 id="title">Two &lt;schedules&gt;</h1>' in found
    assert "<td>it is shorter</td>" in found


def test_an_address_names_a_tile_pair(tmp_path: Path) -> None:
    run = picture().timelines[1]
    index = next(i for i, step in enumerate(run.steps) if (step.head, step.kv, step.q) == (1, 2, 3))
    path = tmp_path / "page.html"
    path.write_text(html(picture()), encoding="utf-8")
    found = opened(path, f"#from=0.1&to=0.9&at=1.{index}")
    assert re.search(r'<div id="tip"[^>]*><b>kv tile 2 . q tile 3</b> · head 1', found)
