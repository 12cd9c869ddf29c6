"""The losses of two recorded runs, step by step: read from their recordings, and shown as curves.

The loss of a step on a rank is what its backwards begin at (`recorder.losses`). That of a run is the mean over ranks,
as data-parallel ranks take the mean of gradients.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from dash_inductor.observers import phases

from .curves import Curve, Point, is_drawn, svg
from .page import plain, section
from .run import Run
from .segments import Segments

Losses = Mapping[int, float]
"""The loss of a run, by step."""


def losses(folder: str | os.PathLike[str]) -> Losses:
    """The loss of each step of a run that has one, the mean over the ranks that have it; reads all files to their ends.

    Raises:
        ArgumentError: the folder has no recording.
        RecordingError: see `Run` and `Segments.steps`.
    """
    sums: dict[int, tuple[float, int]] = {}
    for recording in Run(Path(folder)).recordings.values():
        for step, entries in Segments(recording.paths).steps():
            for entry in entries:
                if entry.name.phase == phases.LOSS:
                    total, ranks = sums.get(step, (0.0, 0))
                    sums[step] = total + entry.value, ranks + 1
    return {step: total / ranks for step, (total, ranks) in sorted(sums.items())}


def sections(a: Losses, b: Losses, first: int = 0) -> list[str]:
    """The section of a page with the curves of the losses of runs a and b, as HTML; none if no run has losses.

    Args:
        a, b: the losses, by the steps of a.
        first: the first step in which anything differs, which is marked; 0 for none.
    """
    pictures = svg(
        "loss by step",
        [Curve("a", "--good", _drawn(a), 4), Curve("b", "--bad", _drawn(b), 1.5)],
        "the loss of each step" + ("; dashed: the first step in which the runs differ" if first else ""),
        mark=first,
    )
    sizes = {step: _distance(a[step], b[step]) for step in a.keys() & b.keys() if not _alike(a[step], b[step])}
    pictures += svg(
        "difference of losses by step",
        [Curve("difference", "--unsure", _drawn(sizes))],
        "|b - a| of each step in which the losses differ",
        logarithmic=True,
        steps=[*a, *b],
        mark=first,
    )
    words = [_sentence(a, b, sizes), *(_not_finite(run, of) for run, of in (("a", a), ("b", b)))]
    text = "".join(f"<p>{plain(each)}</p>" for each in words if each)
    return [section("Loss", pictures + text)] if a or b else []


def _sentence(a: Losses, b: Losses, sizes: Losses) -> str:
    common = len(a.keys() & b.keys())
    if not a or not b:
        return f"Only {'a' if a else 'b'} has losses."
    if not common:
        return "No step has a loss in both runs."
    if not sizes:
        return f"The losses of all {common} steps that both runs have are equal."
    step, (most, size) = min(sizes), max(sizes.items(), key=lambda pair: (pair[1], -pair[0]))
    return f"The losses differ first in step {step}, by {sizes[step]:.2g}, and most in step {most}, by {size:.2g}."


def _not_finite(run: str, of: Losses) -> str:
    steps = [step for step, loss in of.items() if not is_drawn(loss)]
    return f"The loss of {run} is not finite in {len(steps)} steps, first in step {steps[0]}." if steps else ""


def _alike(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _distance(a: float, b: float) -> float:
    return math.inf if math.isnan(b - a) else abs(b - a)


def _drawn(of: Losses) -> list[Point]:
    return [(step, value) for step, value in sorted(of.items()) if is_drawn(value)]
