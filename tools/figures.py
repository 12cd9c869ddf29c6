"""Draw the pictures of the documentation by matplotlib: ``python -m tools.figures``.

They are PNG files in docs/figures.  Their data come from the expressions of the schedules, run by the simulator, and
from benchmarks/results.  Every file holds a digest of what it shows, by which a test finds files that are out of date.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dash_inductor.model.mask import Band
from dash_inductor.schedule.jobs import tables
from dash_inductor.schedule.simulator import Costs, Run, simulate
from dash_inductor.schedule.tile_schedule import Problem
from dash_inductor.timeline import style
from dash_inductor.timeline.image import SETTINGS, figure
from dash_inductor.timeline.model import Picture
from dash_inductor.timeline.simulated import timeline

from . import result_tables

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures"
FULL, CAUSAL = Band(), Band(0)
TILES = 6
"""Tiles of queries, and of keys, in the picture of a tile schedule."""
STEP, ADD, WAIT, OURS, OTHER = "#a9d6cf", "#0b5c55", "#e8a33d", "#12897b", "#9aa7b3"
DPI = 100
DIGEST = "Content"
"""The key of a file's digest among the texts of a PNG file."""


def small(title: str, band: Band, *names: str) -> Picture:
    """Simulates the example of the DASH paper: four q tiles, four kv tiles and, here, two heads, in the paper's cost
    model.
    """
    problem = Problem(band, 4, 4, 1, 1, heads=2)
    runs = tuple(timeline(name, problem, 4, Costs(1.0, 0.5)) for name in names)
    return Picture(title, "Four kv tiles, two heads, four workers; adding a dQ tile takes 0.5.", runs)


def large() -> Picture:
    """Simulates eight heads of 4096 tokens on 132 workers with separate writers, as on an H100."""
    problem = Problem(CAUSAL, 4096, 4096, 64, 128, heads=8, head_chunk=4)
    prices = Costs(1.0, 0.3, 0.3, epilogue=3.0, depth=2)
    runs = tuple(timeline(name, problem, 132, prices) for name in ("bent_fold", "spt", "descending", "ascending"))
    subtitle = "8 heads of 4096 tokens, tiles of 64 queries and 128 keys, 132 workers with writers of their own"
    return Picture("Causal mask, at a realistic size", subtitle, runs)


def _figure(width: float, height: float, **how: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    found = Figure((width, height), layout="constrained", facecolor=style.PAGE)
    axes = found.subplots(squeeze=False, **how)
    for ax in axes.flat:
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0, colors=style.FAINT)
        ax.set_axisbelow(True)
    return found, axes


def run_of(schedule: str) -> Run:
    """Simulates one head of a causal mask with one worker per CTA."""
    problem = Problem(CAUSAL, 128 * TILES, 128 * TILES, 128, 128)
    return simulate(tables(schedule, problem), TILES, Costs(compute=1.0, reduce=0.35))


def _rows(run: Run) -> dict[int, int]:
    """Returns the plot row of each kv tile: CTAs in the order in which they start."""
    return {kv: row for row, kv in enumerate(dict.fromkeys(s.kv for s in sorted(run.spans, key=lambda s: s.work_id)))}


def tile_schedule() -> Any:
    """Draws the ranks of a head's tile pairs, and when each CTA computes, waits and adds, under two schedules."""
    from matplotlib.patches import Patch

    found, axes = _figure(11, 4.8, nrows=2, ncols=2, width_ratios=(2, 3))
    for ax in axes[:, 0]:
        ax.remove()
    ranks, good = found.add_subplot(axes[0, 0].get_gridspec()[:, 0]), run_of("spt")
    rows = _rows(good)
    for s in good.spans:
        ranks.barh(rows[s.kv], 0.94, left=s.accumulator[2] - 0.47, height=0.94, color=STEP)
        ranks.text(s.accumulator[2], rows[s.kv], str(s.rank), ha="center", va="center", weight="bold")
    ranks.set(xlim=(-0.5, TILES - 0.5), ylim=(TILES - 0.5, -0.5), xticks=range(TILES), aspect="equal")
    ranks.set_yticks(range(TILES), [f"CTA of kv {kv}" for kv in rows])
    ranks.set_title("Ranks under spt", loc="left", weight="bold")
    ranks.set_xlabel(
        "dQ tile (queries)\nA row is the tile schedule of one CTA, from left to right.\n"
        "The CTA at the top starts first.\n"
        "The parts of a dQ tile, a column, are added by rank."
    )
    ranks.spines[:].set_visible(False)
    ranks.tick_params(length=0)
    poor = run_of("ascending")
    for ax, name, run in zip(axes[:, 1], ("spt", "ascending"), (good, poor), strict=True):
        rows = _rows(run)
        for s in run.spans:
            for begin, end, colour in (
                (s.start, s.computed, STEP), (s.computed, s.write, WAIT), (s.write, s.written, ADD),
            ):  # fmt: skip
                if end > begin:
                    ax.barh(rows[s.kv], end - begin, left=begin, height=0.84, color=colour, edgecolor=style.PAGE)
            ax.text((s.start + s.computed) / 2, rows[s.kv], str(s.accumulator[2]), ha="center", va="center", size=8)
        waited = sum(s.write - s.computed for s in run.spans)
        verdict = f"{waited:g} units of waiting" if round(waited, 6) else "nobody waits"
        ax.set(xlim=(0, poor.makespan * 1.01), ylim=(TILES - 0.5, -0.5))
        ax.set_yticks(range(TILES), [f"kv {kv}" for kv in rows])
        ax.set_title(name, loc="left", weight="bold")
        ax.set_title(f"ends at {run.makespan:.4g}; {verdict}", loc="right", size=9, color=style.FAINT)
    axes[1, 1].set_xlabel("time", loc="right", color=style.FAINT)
    words = {STEP: "computes a part of this dQ tile", ADD: "adds it", WAIT: "waits for its semaphore"}
    handles = [Patch(color=colour, label=text) for colour, text in words.items()]
    found.legend(handles=handles, loc="outside lower right", ncols=3, frameon=False)
    return found


def _results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def steps() -> Any:
    """Draws the time of training steps relative to the default's, with PyTorch's fastest alternative."""
    conditions, measured = _results("step")["conditions"], result_tables.measured_steps()
    found, ((ax,),) = _figure(10, 1.2 + 0.44 * len(measured))
    for row, variants in enumerate(measured.values()):
        default = variants["default"]["ms"]
        pairs = ((OTHER, result_tables.fastest(variants)), (OURS, variants["dash"]))
        for place, (colour, one) in zip((row - 0.2, row + 0.2), pairs, strict=True):
            ax.barh(place, one["ms"] / default, height=0.36, color=colour)
            text = f"  {one['ms'] / default:.2f}, {one['ms']:.0f} of {default:.0f} ms"
            ax.text(one["ms"] / default, place, text, va="center", size=8, color=style.FAINT)
    ax.set(xlim=(0, 1.25), ylim=(len(measured) - 0.5, -0.5), xticks=(0, 0.25, 0.5, 0.75, 1))
    ax.set_yticks(range(len(measured)), [result_tables.STEPS[name].replace("`", "") for name in measured])
    ax.tick_params(axis="y", labelcolor=style.INK)
    ax.grid(axis="x", color=style.GRID)
    ax.set_title("Time of a training step, relative to PyTorch's default", loc="left", weight="bold")
    where = f"{conditions['gpu']}, bf16, torch {conditions['torch'].split('+')[0]}; forward, backward and AdamW"
    ax.set_xlabel(where, loc="left", color=style.FAINT)
    for colour, text in ((OTHER, "fastest of PyTorch, not deterministic"), (OURS, "dash_inductor, deterministic")):
        ax.barh(0, 0, color=colour, label=text)
    found.legend(loc="outside upper right", ncols=2, frameon=False)
    return found


CONTENDERS = {
    "FA2 det": (OTHER, "FlashAttention-2, deterministic"),
    "cuDNN nondet": ("#c7cfd6", "cuDNN, not deterministic"),
    "FA3 nondet": (WAIT, "FlashAttention-3, not deterministic"),
    "dash": (OURS, "dash_inductor"),
}


def backward() -> Any:
    """Draws the rates of the backward kernels at head dimension 128."""
    rows = {row["shape"]: row for row in _results("backward_h100")["rows"]}
    lengths = (1024, 2048, 4096, 8192, 16384)
    found, (axes,) = _figure(11, 4, ncols=2, sharey=True)
    for ax, mask in zip(axes, ("full", "causal"), strict=True):
        for i, (name, (colour, title)) in enumerate(CONTENDERS.items()):
            rates = [rows[f"regular:d128:{mask}:b{16384 // length}h16:s{length}"][name] for length in lengths]
            places = [place + 0.22 * (i - 1.5) for place in range(len(lengths))]
            bars = ax.bar(places, rates, 0.2, color=colour, label=title if mask == "full" else None)
            ax.bar_label(bars, [f"{rate:.0f}" for rate in rates], fontsize=6.5, color=style.FAINT)
        ax.set_xticks(range(len(lengths)), list(map(str, lengths)))
        ax.grid(axis="y", color=style.GRID)
        ax.set_title(f"{mask} mask", loc="left", weight="bold")
    axes[0].set_ylabel("backward, TFLOP/s, head dimension 128")
    text = "length; 16384 tokens in total, hidden size 2048, bf16, NVIDIA H100, torch 2.11, cuDNN 9.19"
    found.supxlabel(text, size=9, color=style.FAINT)
    found.legend(loc="outside upper center", ncols=4, frameon=False)
    return found


PICTURES: dict[str, Callable[[], Any]] = {
    "tile_schedule": tile_schedule,
    "steps": steps,
    "backward": backward,
    "schedules_full": lambda: figure(small("Full mask", FULL, "ascending", "shift")),
    "schedules_causal": lambda: figure(
        small("Causal mask", CAUSAL, "ascending", "descending", "symmetric_shift", "spt")
    ),
    "schedules_large": lambda: figure(large()),
}


def draw(name: str) -> Any:
    """Draws a picture as a matplotlib figure, independent of the user's matplotlib settings."""
    import matplotlib

    with matplotlib.rc_context(SETTINGS):
        return PICTURES[name]()


def digest(found: Any) -> str:
    """Returns a digest of a figure's content: its texts, and the ends of its bars."""
    parts: list[Any] = [text.get_text() for text in found.texts]
    for ax in found.axes:
        parts += [ax.get_title(at) for at in ("left", "right")] + [ax.get_xlabel(), ax.get_ylabel()]
        parts += [text.get_text() for text in ax.texts]
        for patch in ax.patches:
            path = patch.get_transform() - ax.transData
            corners = path.transform_path(patch.get_path()).vertices
            parts.append([f"{number:.4g}" for number in corners.ravel() if number == number])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def digest_of(path: Path) -> str:
    """Returns the digest that a PNG file stores."""
    data, at = path.read_bytes(), 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        if kind == b"tEXt" and body.startswith(DIGEST.encode() + b"\0"):
            return body.split(b"\0")[1].decode()
        at += length + 12
    raise ValueError(f"{path} has no {DIGEST}")


def main() -> None:
    import matplotlib

    FIGURES.mkdir(exist_ok=True)
    for name in PICTURES:
        found = draw(name)
        with matplotlib.rc_context(SETTINGS):
            found.savefig(FIGURES / f"{name}.png", dpi=DPI, metadata={DIGEST: digest(found), "Software": None})


if __name__ == "__main__":
    main()
