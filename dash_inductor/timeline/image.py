"""Draws a picture as an SVG or PNG image with matplotlib, on a light background."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Literal

from ..errors import MissingPackageError
from . import style
from .model import Kind, Picture, Timeline, ticks
from .style import Colours

_INCHES, _DPI = 12.0, 150
_TOP, _BOTTOM = 0.75, 0.35
"""The margins above and below the panels, in inches."""
_COLUMNS = 1600
"""The number of columns to which a run with many bars is reduced."""
_WRITER_LANES = 32
"""The maximum number of lanes for which writers are drawn."""
SETTINGS: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "hatch.linewidth": 0.9,
    "svg.fonttype": "none",
    "svg.hashsalt": "dash_inductor",
    "text.parse_math": False,
}
"""Settings of matplotlib, which includes this font.  Text in an SVG stays text."""


def image(picture: Picture, kind: Literal["svg", "png"]) -> bytes:
    """Returns a picture as the bytes of an image file; the same version of matplotlib always produces the same bytes.

    Raises:
        MissingPackageError: matplotlib is not installed.
        ArgumentError: timelines in different units.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingPackageError("matplotlib", "SVG and PNG pictures", "pictures") from error
    out = io.BytesIO()
    with matplotlib.rc_context(SETTINGS):
        figure(picture).savefig(out, format=kind, metadata={"Date": None} if kind == "svg" else {})
    return out.getvalue()


def figure(picture: Picture) -> Any:
    """Returns a picture as a matplotlib figure, with one pair of axes for each timeline, from top to bottom.

    matplotlib must be installed.
    """
    from matplotlib.figure import Figure

    colours, timelines = Colours.of(picture), picture.timelines
    panels = [(t, t.writer and len(t.lanes) <= _WRITER_LANES) for t in timelines]
    heights = [min(len(t.lanes) * 0.3, 4.2) + 0.95 for t in timelines]
    height = _TOP + sum(heights) + _BOTTOM
    found = Figure((_INCHES, height), dpi=_DPI, facecolor=style.PAGE)
    inside = 0.015, _BOTTOM / height, 0.97, 1 - (_TOP + _BOTTOM) / height
    found.set_layout_engine("constrained", rect=inside, h_pad=0.08)
    axes = found.subplots(len(timelines), 1, squeeze=False, height_ratios=heights)[:, 0]
    found.text(0.015, 1 - 0.2 / height, picture.title, va="top", size=15, weight="bold", color=style.INK)
    found.text(0.015, 1 - 0.52 / height, picture.subtitle, va="top", size=10, color=style.FAINT)
    for ax, (timeline, writer) in zip(axes, panels, strict=True):
        _draw(ax, timeline, picture, colours, writer)
    found.legend(
        handles=_legend(panels, colours), loc="lower left", bbox_to_anchor=(0.01, 0.05 / height), ncols=12,
        frameon=False, fontsize=9, handlelength=1.5, columnspacing=1.3, labelcolor=style.INK,
    )  # fmt: skip
    return found


def _draw(ax: Any, t: Timeline, picture: Picture, colours: Colours, writer: bool) -> None:
    lanes = len(t.lanes)
    bars: dict[tuple[Kind, int], list[tuple[float, float, float, float]]] = {}
    labels = lanes <= 16
    inset = 0.06 if labels else 0.0
    for drawn in style.rectangles(t, colours, _COLUMNS, writer):
        top, height = drawn.lane + inset, 1 - 2 * inset
        if writer:
            top, height = (top + 0.6 * height, 0.4 * height) if drawn.track else (top, 0.6 * height)
        bars.setdefault((drawn.kind, drawn.colour), []).append((drawn.begin, top, drawn.end - drawn.begin, height))
        text = style.label(t, t.steps[drawn.step])
        room = (drawn.end - drawn.begin) / picture.end * _INCHES * 72 if picture.end else 0.0
        if labels and drawn.step >= 0 and drawn.kind == "compute" and room > 4 + 6 * len(text):
            middle = (drawn.begin + drawn.end) / 2, top + height / 2
            ink = style.ink_on(colours.hues[drawn.colour].compute)
            ax.text(*middle, text, ha="center", va="center", fontsize=8, color=ink)
    for (kind, colour), boxes in bars.items():
        _boxes(ax, kind, colours.hues[colour], boxes, edges=labels)
    ax.axvline(t.end, color=style.INK, linewidth=0.8, linestyle=(0, (3, 3)))
    ax.set(xlim=(0, picture.end * 1.01 or 1), ylim=(lanes, 0), xticks=ticks(picture.end))
    every = next(n for n in (1, 2, 4, 8, 16, 32, 1 << 30) if lanes / n <= 18)
    ax.set_yticks([lane + 0.5 for lane in range(0, lanes, every)], [str(lane) for lane in range(0, lanes, every)])
    name = f"{t.name}  ·  {t.badge}" if t.badge else t.name
    ax.set_title(name, loc="left", fontweight="bold", fontsize=11, color=style.INK, pad=7)
    ax.set_title(style.summary(t), loc="right", fontsize=9, color=style.FAINT, pad=7)
    ax.set_xlabel(picture.unit.axis, loc="right", color=style.FAINT)
    ax.grid(axis="x", color=style.GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(length=0, colors=style.FAINT)
    ax.spines[:].set_visible(False)


def _boxes(ax: Any, kind: Kind, hue: style.Hue, boxes: list[tuple[float, float, float, float]], *, edges: bool) -> None:
    """Adds rectangles (x, y, width, height) of one kind and colour as a single path."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    corners = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h)] for x, y, w, h in boxes]
    look = _look(kind, hue) | ({"edgecolor": style.PAGE, "linewidth": 0.8} if edges and kind != "wait" else {})
    path = Path.make_compound_path(*(Path([*box, box[0]], closed=True) for box in corners))
    ax.add_patch(PathPatch(path, snap=True, **look))


def _look(kind: Kind, hue: style.Hue) -> dict[str, Any]:
    """The fill properties for bars of a kind."""
    if kind == "wait":
        return {"facecolor": "none", "edgecolor": style.WAIT, "hatch": "/////", "linewidth": 0}
    return {"facecolor": hue.add if kind == "add" else hue.compute, "linewidth": 0}


def _legend(panels: Sequence[tuple[Timeline, bool]], colours: Colours) -> list[Any]:
    from matplotlib.patches import Patch

    entries = [Patch(**_look(kind, colours.hues[0]), label=text) for kind, text in style.shown(panels)]
    for i in range(colours.used if colours.used > 1 else 0):
        first = -(-i * colours.kv_tiles // len(colours.hues))
        text = f"q tile {i}" if colours.q_tiles else f"kv {first}"
        entries.append(Patch(facecolor=colours.hues[i].compute, label=text))
    return entries
