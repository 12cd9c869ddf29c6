"""A picture as SVG: one self-contained file that follows the reader's preference for light or dark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from . import style
from .model import Kind, Picture, Timeline, ticks
from .style import Colours, Drawn

WIDTH = 960
_MARGIN, _LEFT, _HEAD, _AXIS, _GAP = 24, 34, 44, 40, 22
"""Pixels around the picture, for the names of lanes, above the lanes of a panel, below them, and between panels."""
_LABELLED = 18
"""Height of lanes with numbers in their bars."""
_SPACE = 'xmlns="http://www.w3.org/2000/svg"'
_HATCH = (
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path d="M0 0V6" class="hatch" stroke-width="2.5"/></pattern>'
)
_CSS = """
text { font: 12px ui-sans-serif, system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: INK; }
.title { font-size: 18px; font-weight: 650; } .name { font-size: 14px; font-weight: 650; }
.badge { font-size: 12px; font-weight: 400; fill: ACCENT; }
.faint, .tick { fill: FAINT; } .tick { font-size: 11px; } .in { font-size: 11px; text-anchor: middle; }
.page { fill: PAGE; stroke: GRID; } .grid { stroke: GRID; } .lane { fill: GRID; opacity: 0.35; }
.end { stroke: INK; stroke-dasharray: 3 3; } .wait { fill: url(#hatch); } .hatch { stroke: WAIT; }
"""


@dataclass(frozen=True)
class _Panel:
    timeline: Timeline
    x: float
    y: float
    width: float
    lane: float  # height
    scale: float  # pixels per unit of time

    @property
    def writer(self) -> bool:
        """Whether there is room for what writers do."""
        return self.timeline.writer and self.lane >= 6

    @property
    def top(self) -> float:
        return self.y + _HEAD

    @property
    def bottom(self) -> float:
        return self.top + self.lane * len(self.timeline.lanes)


def svg(picture: Picture) -> str:
    """The picture as the text of an SVG file.

    Small runs stand two in a row; hovering a bar names its tile pair.

    Raises:
        ArgumentError: timelines in different units.
    """
    panels = _layout(picture)
    colours = Colours.of(picture)
    legend_y = max((p.bottom for p in panels), default=_MARGIN + 40) + _AXIS + _GAP
    body = [part for panel in panels for part in _panel(panel, picture, colours)]
    legend, height = _legend(panels, colours, legend_y)
    return "\n".join(
        [
            f'<svg {_SPACE} viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}" role="img">',
            f"<title>{escape(picture.title)}</title>",
            f"<style>{_css(colours)}</style>",
            f"<defs>{_HATCH}</defs>",
            f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="10"/>',
            f'<text class="title" x="{_MARGIN}" y="{_MARGIN + 14}">{escape(picture.title)}</text>',
            f'<text class="faint" x="{_MARGIN}" y="{_MARGIN + 34}">{escape(picture.subtitle)}</text>',
            *body,
            *legend,
            "</svg>\n",
        ]
    )


def _css(colours: Colours) -> str:
    names = ("INK", "FAINT", "GRID", "PAGE", "WAIT", "ACCENT")
    light, dark = _CSS, _CSS
    for name in names:
        light = light.replace(name, getattr(style, name))
        dark = dark.replace(name, getattr(style, f"{name}_DARK"))
    for i, hue in enumerate(colours.hues):
        light += _fills(i, hue.compute, hue.add)
        dark += _fills(i, hue.compute_dark, hue.add_dark)
    return f"{light}@media (prefers-color-scheme: dark) {{{dark}}}\n"


def _fills(i: int, compute: str, add: str) -> str:
    """The fills of bars and of the text in them."""
    return f".c{i} {{ fill: {compute}; }} .a{i} {{ fill: {add}; }} .t{i} {{ fill: {style.ink_on(compute)}; }}\n"


def _layout(picture: Picture) -> list[_Panel]:
    timelines = picture.timelines
    small = all(len(t.bars) <= 30 * len(t.lanes) and len(t.lanes) <= 16 for t in timelines)
    columns = 2 if small and len(timelines) > 1 else 1
    width = (WIDTH - 2 * _MARGIN - (columns - 1) * _GAP) / columns
    scale = (width - _LEFT - 8) / picture.end if picture.end else 0.0
    panels: list[_Panel] = []
    y = _MARGIN + 52.0
    for first in range(0, len(timelines), columns):
        row = timelines[first : first + columns]
        for column, timeline in enumerate(row):
            lane = min(26.0, max(2.5, 330 / len(timeline.lanes)))
            panels.append(_Panel(timeline, _MARGIN + column * (width + _GAP), y, width, lane, scale))
        y = max(p.bottom for p in panels) + _AXIS + _GAP
    return panels


def _panel(p: _Panel, picture: Picture, colours: Colours) -> Iterator[str]:
    t, left, right = p.timeline, p.x + _LEFT, p.x + p.width - 8
    badge = f'<tspan class="badge" dx="8">{escape(t.badge)}</tspan>' if t.badge else ""
    yield f'<text class="name" x="{p.x:g}" y="{p.y + 16:g}">{escape(t.name)}{badge}</text>'
    yield f'<text class="faint" x="{p.x:g}" y="{p.y + 33:g}">{escape(style.summary(t))}</text>'
    every = next(n for n in (1, 2, 4, 8, 16, 32, 64, 128, 1 << 30) if n * p.lane >= 13)
    for lane in range(len(t.lanes)):
        y = p.top + lane * p.lane
        if p.lane >= 8:
            yield (
                f'<rect class="lane" x="{left:g}" y="{y + 1:g}" width="{right - left:g}" height="{p.lane - 2:g}" '
                'rx="2"/>'
            )
        if lane % every == 0:
            middle = y + min(p.lane, 13) / 2 + 4
            yield f'<text class="tick" text-anchor="end" x="{left - 6:g}" y="{middle:.1f}">{lane}</text>'
    for at in ticks(picture.end):
        x = left + at * p.scale
        yield f'<path class="grid" d="M{x:.1f} {p.top:g}V{p.bottom + 5:g}"/>'
        yield f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="{p.bottom + 18:g}">{at:g}</text>'
    axis = escape(picture.unit.axis)
    yield f'<text class="tick" text-anchor="end" x="{right:g}" y="{p.bottom + 33:g}">{axis}</text>'
    for drawn in style.rectangles(t, colours, max(1, round(t.end * p.scale)), p.writer):
        yield from _bar(p, drawn, left)
    x = left + t.end * p.scale
    yield f'<path class="end" d="M{x:.1f} {p.top - 4:g}V{p.bottom + 5:g}"/>'


def _bar(p: _Panel, drawn: Drawn, left: float) -> Iterator[str]:
    t = p.timeline
    inset = 1.0 if p.lane >= 8 else 0.0
    y, height = p.top + drawn.lane * p.lane + inset, p.lane - 2 * inset
    if p.writer:
        upper = height * 0.6
        y, height = (y + upper, height - upper) if drawn.track else (y, upper)
    x, width = left + drawn.begin * p.scale, (drawn.end - drawn.begin) * p.scale
    gap = 0.8 if width > 4 else 0.0
    name = {"compute": f"c{drawn.colour}", "add": f"a{drawn.colour}", "wait": "wait"}[drawn.kind]
    size = f'x="{x + gap / 2:.2f}" y="{y:.2f}" width="{width - gap:.2f}" height="{height:.2f}"'
    if drawn.step < 0:
        yield f'<rect class="{name}" {size}/>'
        return
    step = t.steps[drawn.step]
    where = f"{t.heads[step.head]}, kv tile {step.kv}, q tile {step.q}, rank {step.rank}"
    what = f"{style.MEANING[drawn.kind]}: {drawn.begin:g} to {drawn.end:g}"
    rounded = ' rx="2"' if width > 8 else ""
    yield f'<rect class="{name}" {size}{rounded}><title>{escape(where)}\n{what}</title></rect>'
    text = style.label(t, step)
    if drawn.kind == "compute" and width > 5 + 7 * len(text) and height >= 11 and p.lane >= _LABELLED:
        yield f'<text class="in t{drawn.colour}" x="{x + width / 2:.1f}" y="{y + height / 2 + 4:.1f}">{text}</text>'


def _legend(panels: Sequence[_Panel], colours: Colours, y: float) -> tuple[list[str], float]:
    """The legend from `y` down, and the height of the picture with it."""
    x, parts = float(_MARGIN), []

    def entry(kinds: Sequence[str], text: str) -> None:
        nonlocal x, y
        swatch = 20 if len(kinds) == 1 else 14
        width = (swatch + 1) * len(kinds) + 6.3 * len(text) + 26
        if x + width > WIDTH - _MARGIN:
            x, y = float(_MARGIN), y + 24
        for i, kind in enumerate(kinds):
            at = x + i * (swatch + 1)
            parts.append(f'<rect class="{kind}" x="{at:g}" y="{y - 11:g}" width="{swatch}" height="14" rx="2"/>')
        parts.append(f'<text x="{x + (swatch + 1) * len(kinds) + 6:g}" y="{y:g}">{escape(text)}</text>')
        x += width

    classes: dict[Kind, str] = {"compute": "c0", "wait": "wait", "add": "a0"}
    for kind, text in style.shown((p.timeline, p.writer) for p in panels):
        entry((classes[kind],), text)
    if colours.used > 1:
        entry([f"c{i}" for i in range(colours.used)], colours.meaning)
    if any(p.lane >= _LABELLED and len(p.timeline.bars) <= style.MOST_BARS for p in panels):
        several = any(len(p.timeline.heads) > 1 for p in panels)
        entry((), "a0: q tile 0 of head a" if several else "numbers: q tiles")
    return parts, y + _MARGIN
