"""A picture as PNG, drawn by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from ..errors import MissingPackageError
from . import style
from .model import Kind, Picture, Timeline, ticks
from .style import Colours

_INCHES, _DPI = 12.0, 150
_TOP, _BOTTOM = 0.75, 0.35
"""Inches above the panels and below them."""
_WRITER_LANES = 32
"""Lanes with which there is room for what writers do."""


def png(picture: Picture) -> bytes:
    """The picture as a PNG file, on a light page.

    Raises:
        MissingPackageError: matplotlib is not installed.
        ArgumentError: timelines in different units.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError("matplotlib", "PNG pictures") from error
    colours, timelines = Colours.of(picture), picture.timelines
    panels = [(t, t.writer and len(t.lanes) <= _WRITER_LANES) for t in timelines]
    heights = [min(len(t.lanes) * 0.3, 4.2) + 0.95 for t in timelines]
    height = _TOP + sum(heights) + _BOTTOM
    with matplotlib.rc_context({"font.family": "sans-serif", "font.size": 9, "hatch.linewidth": 0.9}):
        figure = Figure((_INCHES, height), dpi=_DPI, facecolor=style.PAGE)
        FigureCanvasAgg(figure)
        inside = 0.015, _BOTTOM / height, 0.97, 1 - (_TOP + _BOTTOM) / height
        figure.set_layout_engine("constrained", rect=inside, h_pad=0.08)
        axes = figure.subplots(len(timelines), 1, squeeze=False, height_ratios=heights)[:, 0]
        figure.text(0.015, 1 - 0.2 / height, picture.title, va="top", size=15, weight="bold", color=style.INK)
        figure.text(0.015, 1 - 0.52 / height, picture.subtitle, va="top", size=10, color=style.FAINT)
        for ax, (timeline, writer) in zip(axes, panels, strict=True):
            _draw(ax, timeline, picture, colours, writer)
        figure.legend(
            handles=_legend(panels, colours), loc="lower left", bbox_to_anchor=(0.01, 0.05 / height), ncols=12,
            frameon=False, fontsize=9, handlelength=1.5, columnspacing=1.3, labelcolor=style.INK,
        )  # fmt: skip
        out = io.BytesIO()
        figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def _draw(ax: Any, t: Timeline, picture: Picture, colours: Colours, writer: bool) -> None:
    lanes = len(t.lanes)
    bars: dict[tuple[Kind, int], list[tuple[float, float, float, float]]] = {}
    labels = lanes <= 16
    inset = 0.06 if labels else 0.0
    for drawn in style.rectangles(t, colours, 1600, writer):
        top, height = drawn.lane + inset, 1 - 2 * inset
        if writer:
            top, height = (top + 0.6 * height, 0.4 * height) if drawn.track else (top, 0.6 * height)
        bars.setdefault((drawn.kind, drawn.colour), []).append((drawn.begin, top, drawn.end - drawn.begin, height))
        text = style.label(t, t.steps[drawn.step])
        room = (drawn.end - drawn.begin) / picture.end * _INCHES * 72 if picture.end else 0.0
        if labels and drawn.step >= 0 and drawn.kind == "compute" and room > 4 + 6 * len(text):
            middle, ink = (
                ((drawn.begin + drawn.end) / 2, top + height / 2),
                style.ink_on(colours.hues[drawn.colour].compute),
            )
            ax.text(*middle, text, ha="center", va="center", fontsize=8, color=ink)
    for (kind, colour), boxes in bars.items():
        _boxes(ax, kind, colours.hues[colour], boxes, edges=labels)
    ax.axvline(t.end, color=style.INK, linewidth=0.8, linestyle=(0, (3, 3)))
    ax.set(xlim=(0, picture.end * 1.01 or 1), ylim=(lanes, 0), xticks=ticks(picture.end))
    every = next(n for n in (1, 2, 4, 8, 16, 32, 1 << 30) if lanes / n <= 18)
    ax.set_yticks([lane + 0.5 for lane in range(0, lanes, every)], [str(lane) for lane in range(0, lanes, every)])
    ax.set_title(
        f"{t.name}  ·  {t.badge}" if t.badge else t.name,
        loc="left",
        fontweight="bold",
        fontsize=11,
        color=style.INK,
        pad=7,
    )
    ax.set_title(style.summary(t), loc="right", fontsize=9, color=style.FAINT, pad=7)
    ax.set_xlabel(picture.unit.axis, loc="right", color=style.FAINT)
    ax.grid(axis="x", color=style.GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(length=0, colors=style.FAINT)
    ax.spines[:].set_visible(False)


def _boxes(ax: Any, kind: str, hue: style.Hue, boxes: list[tuple[float, float, float, float]], *, edges: bool) -> None:
    """Add rectangles (x, y, width, height) of one kind and colour."""
    from matplotlib.collections import PolyCollection

    corners = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h)] for x, y, w, h in boxes]
    look: dict[str, Any] = {"facecolors": hue.add if kind == "add" else hue.compute}
    if kind == "wait":
        look = {"facecolors": "none", "edgecolors": style.WAIT, "hatch": "/////", "linewidths": 0}
    elif edges:
        look |= {"edgecolors": style.PAGE, "linewidths": 0.8}
    ax.add_collection(PolyCollection(corners, **look))


def _legend(panels: Sequence[tuple[Timeline, bool]], colours: Colours) -> list[Any]:
    from matplotlib.patches import Patch

    hue = colours.hues[0]
    looks: dict[Kind, dict[str, Any]] = {
        "compute": {"facecolor": hue.compute},
        "wait": {"facecolor": "none", "edgecolor": style.WAIT, "hatch": "/////", "linewidth": 0},
        "add": {"facecolor": hue.add},
    }
    entries = [Patch(**looks[kind], label=text) for kind, text in style.shown(panels)]
    for i in range(colours.used if colours.used > 1 else 0):
        first = -(-i * colours.kv_tiles // len(colours.hues))
        text = f"q tile {i}" if colours.q_tiles else f"kv {first}"
        entries.append(Patch(facecolor=colours.hues[i].compute, label=text))
    return entries
