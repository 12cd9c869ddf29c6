"""Draw the pictures of the documentation that explain and that show results: ``python tools/docs_figures.py``.

They are SVG files in docs/figures that follow the colours of the reader's system.  Their data come from the expressions
of the schedules, run by the simulator, and from benchmarks/results.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dash_inductor.model import Band  # noqa: E402
from dash_inductor.schedule.jobs import tables  # noqa: E402
from dash_inductor.schedule.simulator import Costs, Run, simulate  # noqa: E402
from dash_inductor.schedule.walk import Problem  # noqa: E402

FIGURES = ROOT / "docs" / "figures"
TILES = 6
COSTS = Costs(compute=1.0, reduce=0.35)
STYLE = """
:root{--paper:#fff;--edge:#d5dbe1;--ink:#1f2933;--soft:#66727f;--cell:#eef2f5;--step:#a9d6cf;--ours:#12897b;--add:#0b5c55;
--wait:#e8a33d;--other:#9aa7b3;--third:#c7cfd6;--fourth:#e8a33d}
@media (prefers-color-scheme:dark){:root{--paper:#1e2129;--edge:#3a4150;--ink:#e3e8ee;--soft:#9aa6b5;--cell:#2a2f3a;
--step:#2c6e67;--ours:#3fb8a8;--add:#7fe0d2;--wait:#d8922b;--other:#75818f;--third:#4d5666;--fourth:#d8922b}}
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;font-size:13px;fill:var(--ink)}
.soft{fill:var(--soft)}.small{font-size:11px}.tiny{font-size:9px}.big{font-size:15px;font-weight:600}.bold{font-weight:600}
.mid{text-anchor:middle}.end{text-anchor:end}
"""


def rect(x: float, y: float, width: float, height: float, fill: str, title: str = "", radius: float = 2) -> str:
    size = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" rx="{radius:g}"'
    return f'<rect {size} style="fill:var(--{fill})">{f"<title>{escape(title)}</title>" if title else ""}</rect>'


def text(x: float, y: float, words: object, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(str(words))}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str = "edge", more: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" style="stroke:var(--{colour})" {more}/>'


def picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """An SVG image on a card."""
    label = f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}"'
    edges = f'x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"'
    card = f'<rect {edges} style="fill:var(--paper);stroke:var(--edge)"/>'
    return "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" {label}>', f"<style>{STYLE}</style>", card, *parts, "</svg>\n"]
    )


def run_of(schedule: str) -> Run:
    """One head of a causal mask, one worker for each CTA."""
    return simulate(tables(schedule, Problem(Band(lo=0), 128 * TILES, 128 * TILES, 128, 128)), TILES, COSTS)


def walk() -> str:
    """The ranks of a head's tile pairs, and when each CTA computes, adds and waits under two schedules."""
    good, poor = run_of("spt"), run_of("ascending")
    parts = [text(28, 36, "Ranks under spt", "big"), *_ranks(good, 96, 92, 38)]
    scale = 440 / poor.makespan
    for run, name, y in ((good, "spt", 36.0), (poor, "ascending", 246.0)):
        waited = sum(span.write - span.computed for span in run.spans)
        verdict = f"{waited:g} units of waiting" if round(waited, 6) else "nobody waits"
        parts += [text(430, y, name, "big"), text(960, y, f"ends at {run.makespan:.4g}; {verdict}", "end soft")]
        parts += _lanes(run, 500, y + 16, scale)
    parts += [line(500, 436, 950, 436, "soft"), text(950, 454, "time", "end soft small")]
    legend = (("step", "computes a part of this dQ tile"), ("add", "adds it"), ("wait", "waits for its turn"))
    for left, (fill, words) in zip((430, 680, 780), legend, strict=True):
        parts += [rect(left, 474, 14, 14, fill), text(left + 20, 486, words, "soft")]
    return picture(980, 504, "The ranks of one head under spt, and timelines under spt and ascending", parts)


def _ranks(run: Run, x: float, y: float, side: float) -> Iterator[str]:
    """A row for each CTA in launch order, a column for each dQ tile, an arrow for a walk."""
    rows = {kv: row for row, kv in enumerate(dict.fromkeys(s.kv for s in sorted(run.spans, key=lambda s: s.ticket)))}
    yield text(x + TILES * side / 2, y - 28, "dQ tile (queries)", "mid soft")
    for q in range(TILES):
        yield text(x + (q + 0.5) * side, y - 8, q, "mid bold")
    for kv, row in rows.items():
        yield text(x - 10, y + (row + 0.62) * side, f"CTA of kv {kv}", "end small")
        for q in range(TILES):
            yield rect(x + q * side + 1, y + row * side + 1, side - 2, side - 2, "cell")
    for s in run.spans:
        left, top, q = x + s.accumulator[2] * side, y + rows[s.kv] * side, s.accumulator[2]
        yield rect(left + 1, top + 1, side - 2, side - 2, "step", f"CTA of kv {s.kv}, dQ tile {q}: rank {s.rank}")
        yield text(left + side / 2, top + side / 2 + 5, s.rank, "mid bold")
    for row in range(1, len(rows)):
        left = x + (TILES - 1 - row) * side
        yield line(left + 9, y + (row + 0.86) * side, x + TILES * side - 12, y + (row + 0.86) * side, "soft")
        tip, level = x + TILES * side - 8, y + (row + 0.86) * side
        yield f'<path d="M{tip - 6:.1f} {level - 3:.1f}l6 3l-6 3z" style="fill:var(--soft)"/>'
    bottom = y + len(rows) * side
    for i, words in enumerate(
        (
            "A row is the walk of one CTA, from left to",
            "right; the CTA at the top starts first. The",
            "parts of a dQ tile, a column, are added in",
            "the order of their ranks: 0, 1, 2, ...",
        )
    ):
        yield text(28, bottom + 34 + 18 * i, words, "soft")


def _lanes(run: Run, x: float, y: float, scale: float) -> Iterator[str]:
    lanes = {kv: row for row, kv in enumerate(dict.fromkeys(s.kv for s in sorted(run.spans, key=lambda s: s.ticket)))}
    height = 26
    for kv, row in lanes.items():
        yield text(x - 10, y + row * height + 17, f"kv {kv}", "end small")
        yield rect(x, y + row * height + 2, run.makespan * scale, height - 4, "cell")
    for s in run.spans:
        top, label = y + lanes[s.kv] * height + 2, f"kv {s.kv}, dQ tile {s.accumulator[2]}, rank {s.rank}"
        for begin, end, fill in (
            (s.start, s.computed, "step"),
            (s.computed, s.write, "wait"),
            (s.write, s.written, "add"),
        ):
            if end > begin:
                yield rect(
                    x + begin * scale + 0.5,
                    top,
                    (end - begin) * scale - 1,
                    height - 4,
                    fill,
                    f"{label}: {begin:g} to {end:g}",
                    1,
                )
        yield text(x + (s.start + s.computed) / 2 * scale, top + 15, s.accumulator[2], "mid small")


def _results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def steps() -> str:
    """The time of measured training steps relative to the default's, beside the fastest that PyTorch has."""
    tool = runpy.run_path(str(ROOT / "tools" / "result_tables.py"))
    conditions, x, top, row, full = _results("step")["conditions"], 440.0, 92.0, 44.0, 320.0
    parts = [text(28, 36, "Time of a training step, relative to PyTorch's default", "big")]
    parts += [rect(x, 50, 12, 12, "other"), text(x + 18, 61, "fastest of PyTorch, not deterministic", "soft small")]
    parts += [rect(x + 250, 50, 12, 12, "ours"), text(x + 268, 61, "dash_inductor, deterministic", "soft small")]
    measured = tool["measured_steps"]()
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts += [line(x + share * full, top - 8, x + share * full, top + len(measured) * row - 10)]
        parts += [text(x + share * full, top - 14, f"{share:g}", "mid soft small")]
    for i, (name, variants) in enumerate(measured.items()):
        y, default = top + i * row, variants["default"]["ms"]
        parts += [text(28, y + 20, tool["STEPS"][name].replace("`", ""), "")]
        for at, fill, one in ((0, "other", tool["fastest"](variants)), (16, "ours", variants["dash"])):
            share = one["ms"] / default
            parts += [rect(x, y + at, min(share, 1.1) * full, 14, fill)]
            parts += [
                text(x + full + 50, y + at + 12, f"{share:.2f}, {one['ms']:.0f} of {default:.0f} ms", "soft small")
            ]
    height = int(top + len(measured) * row + 34)
    where = f"{conditions['gpu']}, bf16, torch {conditions['torch'].split('+')[0]}; forward, backward and AdamW"
    parts += [text(28, height - 14, where, "soft small")]
    return picture(1030, height, "Training steps relative to PyTorch's default", parts)


def backward() -> str:
    """The rates of the backward kernels at head dimension 128."""
    rows = {row["shape"]: row for row in _results("backward_h100")["rows"]}
    lengths = (1024, 2048, 4096, 8192, 16384)
    contenders = {
        "FA2 det": ("other", "FlashAttention-2, deterministic"),
        "cuDNN nondet": ("third", "cuDNN, not deterministic"),
        "FA3 nondet": ("fourth", "FlashAttention-3, not deterministic"),
        "dash": ("ours", "dash_inductor"),
    }
    parts, base, unit, most = [text(28, 36, "Backward, TFLOP/s, head dimension 128", "big")], 330.0, 0.34, 600
    for panel, mask in enumerate(("full", "causal")):
        x = 60 + panel * 470
        parts += [text(x, 74, f"{mask} mask", "bold")]
        for rate in range(0, most + 1, 200):
            parts += [
                line(x, base - rate * unit, x + 430, base - rate * unit),
                text(x - 6, base - rate * unit + 4, rate, "end soft small"),
            ]
        for i, length in enumerate(lengths):
            row = rows[f"regular:d128:{mask}:b{16384 // length}h16:s{length}"]
            for j, (name, (fill, title)) in enumerate(contenders.items()):
                parts += [
                    rect(
                        x + 6 + i * 86 + j * 20,
                        base - row[name] * unit,
                        18,
                        row[name] * unit,
                        fill,
                        f"{title}: {row[name]:.0f}",
                    )
                ]
                parts += [
                    text(x + 15 + i * 86 + j * 20, base - row[name] * unit - 4, f"{row[name]:.0f}", "mid tiny soft")
                ]
            parts += [text(x + 45 + i * 86, base + 18, length, "mid small")]
    x = 60.0
    for fill, title in contenders.values():
        parts += [rect(x, 366, 14, 14, fill), text(x + 20, 378, title, "soft")]
        x += 50 + 6.7 * len(title)
    parts += [
        text(
            60,
            404,
            "by length; 16384 tokens in total, hidden size 2048, bf16, NVIDIA H100, torch 2.11, cuDNN 9.19",
            "soft small",
        )
    ]
    return picture(1000, 420, "Rates of backward kernels", parts)


PICTURES = {"walk": walk, "steps": steps, "backward": backward}


def main() -> None:
    FIGURES.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FIGURES / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
