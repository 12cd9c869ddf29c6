"""Shows the sizes of differences between two runs as HTML: curves over the steps, and the tensors that differ most."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .curves import Curve, svg
from .layouts import LayoutComparison, StepMagnitude, Verdict
from .page import document, items, mono, plain, section, table
from .report import LAYOUT_HEADLINES, factor_text

_COLOURS: dict[Verdict, str] = {"within rounding": "--good", "beyond rounding": "--bad", "not comparable": "--unsure"}
_CURVES = (("gradients", "--bad"), ("parameters", "--unsure"))


def html(result: LayoutComparison, losses: Sequence[str] = ()) -> str:
    """The HTML page about a comparison of layouts.

    Args:
        result: the comparison.
        losses: sections about losses (`losses.sections`), HTML.
    """
    runs = table(("", "recording"), [("a", mono(result.a)), ("b", mono(result.b))])
    parts = [section("Runs", f"{runs}<p>{plain(result.conclusion)}</p>"), *losses, *magnitudes(result)]
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
    shown = [
        Curve(name, colour, [(step.step, size) for step in steps if 0 < (size := getattr(step, name)) < math.inf])
        for name, colour in _CURVES
    ]
    legend = "norm of the difference, divided by the norm in a"
    return svg("relative differences by step", shown, legend, logarithmic=True)
