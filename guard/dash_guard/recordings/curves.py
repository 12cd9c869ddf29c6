"""Draws curves over training steps as SVG, with a linear or a logarithmic scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

Point = tuple[int, float]
"""A step and a value, which `is_drawn`."""

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 180, 70, 10, 10, 20
_POINTS = 300  # of a curve; of more, the lowest and the highest of each group of neighbours are drawn
_DOTS = 60  # a curve of more points has no dots
_TICKS = 6


def is_drawn(value: float) -> bool:
    """Whether a curve may have this value: neither NaN nor infinite, nor too large for sums of such values."""
    return -1e300 < value < 1e300


@dataclass(frozen=True)
class Curve:
    """A curve of a picture.

    Attributes:
        name: its name in the legend.
        colour: the variable of its colour.
        points: its points, in ascending order of steps.
        width: of the line, in pixels.
    """

    name: str
    colour: str
    points: Sequence[Point]
    width: float = 2


def svg(
    title: str,
    curves: Sequence[Curve],
    legend: str,
    logarithmic: bool = False,
    steps: Sequence[int] = (),
    mark: int = 0,
) -> str:
    """A picture of curves with its legend, as HTML; "" if no curve has a point.

    Args:
        title: what the picture shows.
        curves: the curves; with a logarithmic scale, all values are positive.
        legend: what the values are, for the legend.
        logarithmic: whether the scale of values is logarithmic.
        steps: the picture has room for these steps, too.
        mark: a step at which there is a dashed line; 0 for none.
    """
    curves = [each for each in curves if each.points]
    if not curves:
        return ""
    drawn = [_thinned(each.points) for each in curves]
    if logarithmic:
        drawn = [[(step, math.log10(value)) for step, value in points] for points in drawn]
    values = [value for points in drawn for _, value in points]
    numbers = [*steps, *(each.points[end][0] for each in curves for end in (0, -1))]
    ticks = _ticks(min(values), max(values), logarithmic)
    frame = _Frame(min(numbers), max(numbers), ticks[0], ticks[-1])
    lines = frame.lines(ticks, logarithmic, mark)
    for each, points in zip(curves, drawn, strict=True):
        places = [frame.at(*point) for point in points]
        path, colour = " ".join(f"{x:.1f},{y:.1f}" for x, y in places), f"var({each.colour})"
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{each.width}"/>')
        if len(places) <= _DOTS:
            lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in places]
    keys = " ".join(f'<b style="color: var({each.colour})">{each.name}</b>' for each in curves)
    return (
        f'<svg role="img" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" font-size="11">'
        f'<title>{title}</title>{"".join(lines)}</svg><p class="soft">{keys}: {legend}</p>'
    )


@dataclass(frozen=True)
class _Frame:
    """The steps and the values at the edges of a picture."""

    first: int
    last: int
    low: float
    high: float

    def at(self, step: int, value: float) -> tuple[float, float]:
        """Where a point is, in pixels from the upper left corner."""
        across, up = (step - self.first) / max(self.last - self.first, 1), (value - self.low) / (self.high - self.low)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _TOP + (1 - up) * (_HEIGHT - _TOP - _BOTTOM)

    def lines(self, ticks: Sequence[float], logarithmic: bool, mark: int) -> list[str]:
        """The lines and numbers of both scales, and the line of a mark."""
        lines = []
        for tick in ticks:
            x, y = self.at(self.first, tick)
            text = f"1e{tick:.0f}" if logarithmic else f"{tick:.6g}"
            lines.append(f'<line x1="{x}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="var(--line)"/>')
            lines.append(f'<text x="{x - 8}" y="{y + 4:.1f}" text-anchor="end" fill="var(--soft)">{text}</text>')
        for step, anchor in {self.first: "start", self.last: "end"}.items():
            place = f'x="{self.at(step, self.low)[0]:.0f}" y="{_HEIGHT - 4}" text-anchor="{anchor}"'
            lines.append(f'<text {place} fill="var(--soft)">{step}</text>')
        if self.first <= mark <= self.last:
            (x, y), top = self.at(mark, self.low), self.at(mark, self.high)[1]
            line = f'x1="{x:.1f}" y1="{y:.1f}" x2="{x:.1f}" y2="{top:.1f}"'
            lines.append(f'<line {line} stroke="var(--soft)" stroke-dasharray="3 3"><title>step {mark}</title></line>')
        return lines


def _thinned(points: Sequence[Point]) -> list[Point]:
    """The points of a curve that are drawn: a single step that stands out is among them."""
    if len(points) <= _POINTS:
        return list(points)
    size = -(-len(points) // (_POINTS // 2))
    groups = (list(group) for _, group in groupby(enumerate(points), lambda pair: pair[0] // size))
    ends = ({min(group, key=_value), max(group, key=_value)} for group in groups)
    return [point for pair in ends for _, point in sorted(pair)]


def _value(numbered: tuple[int, Point]) -> float:
    return numbered[1][1]


def _ticks(low: float, high: float, logarithmic: bool) -> list[float]:
    """At least two values in ascending order, of which the first and the last enclose all points."""
    if logarithmic:
        unit = float(max(1, math.ceil((high - low) / _TICKS)))
    else:
        rough = max((high - low or abs(high) or 1) / _TICKS, max(abs(high), abs(low)) * 1e-6, 1e-300)
        power = 10.0 ** math.floor(math.log10(rough))
        unit = next((times * power for times in (1, 2, 5) if times * power >= rough), 10 * power)
    first, last = math.floor(low / unit), math.ceil(high / unit)
    return [number * unit for number in range(first, max(last, first + 1) + 1)]
