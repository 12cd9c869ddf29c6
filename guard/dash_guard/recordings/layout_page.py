"""Shows the sizes of differences between two runs as HTML: curves over the steps, and the tensors that differ most."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .layouts import LayoutComparison, StepMagnitude, Verdict
from .page import document, items, mono, plain, section, table
from .report import LAYOUT_HEADLINES, factor_text

_COLOURS: dict[Verdict, str] = {"within rounding": "--good", "beyond rounding": "--bad", "not comparable": "--unsure"}
_CURVES = (("gradients", "--bad"), ("parameters", "--unsure"))
_WIDTH, _HEIGHT, _LEFT = 640, 180, 60


def html(result: LayoutComparison) -> str:
    """The HTML page about a comparison of layouts."""
    runs = table(("", "recording"), [("a", mono(result.a)), ("b", mono(result.b))])
    parts = [section("Runs", f"{runs}<p>{plain(result.conclusion)}</p>"), *magnitudes(result)]
    if result.state:
        parts.append(section("State that differs in this step", items(each.what for each in result.state)))
    if result.reasons:
        parts.append(section("Not compared", items(result.reasons)))
    return document(result.verdict, _COLOURS[result.verdict], LAYOUT_HEADLINES[result.verdict], parts)


def magnitudes(result: LayoutComparison) -> list[str]:
    """The sections of a page about the sizes of differences: none if no step has values in both runs."""
    parts = []
    if result.steps:
        rows = [
            (str(one.step), f"{one.gradients:.1e}", factor_text(one.factor), f"{one.parameters:.1e}",
             f"{one.largest:.1e}")
            for one in result.steps
        ]  # fmt: skip
        header = ("step", "gradients", "factor", "parameters", "largest")
        parts.append(section("Relative differences by step", _curves(result.steps) + table(header, rows)))
    if result.tensors:
        tensors = [
            (mono(each.tensor), f"{each.relative:.1e}", f"{each.largest:.1e}", str(each.ulps), factor_text(each.factor),
             "yes" if each.beyond else "no")
            for each in result.tensors
        ]  # fmt: skip
        names = ("gradient", "relative", "largest", "ulps", "factor", "beyond rounding")
        parts.append(section(f"Gradients that differ most in step {result.deciding}", table(names, tensors)))
    return parts


def _curves(steps: Sequence[StepMagnitude]) -> str:
    """Curves over the steps, with a logarithmic scale, and their legend; "" if nothing differs."""
    points = {
        name: [(step.step, math.log10(size)) for step in steps if 0 < (size := getattr(step, name)) < math.inf]
        for name, _ in _CURVES
    }
    found = [size for curve in points.values() for _, size in curve]
    if not found:
        return ""
    low, high = math.floor(min(found)), max(math.ceil(max(found)), math.floor(min(found)) + 1)
    first, last = steps[0].step, max(steps[-1].step, steps[0].step + 1)

    def at(step: int, size: float) -> tuple[float, float]:
        across, up = (step - first) / (last - first), (size - low) / (high - low)
        return _LEFT + across * (_WIDTH - _LEFT - 10), 10 + (1 - up) * (_HEIGHT - 30)

    lines = []
    for power in range(low, high + 1):
        x, y = at(first, power)
        lines.append(f'<line x1="{x:.0f}" y1="{y:.1f}" x2="{_WIDTH - 10}" y2="{y:.1f}" stroke="var(--line)"/>')
        lines.append(f'<text x="{x - 8:.0f}" y="{y + 4:.1f}" text-anchor="end" fill="var(--soft)">1e{power}</text>')
    for step in (first, steps[-1].step):
        lines.append(f'<text x="{at(step, low)[0]:.0f}" y="{_HEIGHT - 4}" fill="var(--soft)">{step}</text>')
    for name, colour in _CURVES:
        places = [at(*point) for point in points[name]]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        lines.append(f'<polyline points="{path}" fill="none" stroke="var({colour})" stroke-width="2"/>')
        lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="var({colour})"/>' for x, y in places]
    keys = " ".join(f'<b style="color: var({colour})">{name}</b>' for name, colour in _CURVES)
    return (
        f'<svg role="img" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" font-size="11">'
        f"<title>relative differences by step</title>{''.join(lines)}</svg>"
        f'<p class="soft">{keys}: norm of the difference, divided by the norm in a</p>'
    )
