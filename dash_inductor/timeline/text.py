"""Draws a timeline as text for terminals."""

from __future__ import annotations

from .model import Timeline
from .style import summary

_HEADS = "abcdefghijklmnopqrstuvwxyz"


def text(timeline: Timeline, width: int = 90) -> str:
    """Returns a timeline as text: a summary line, then one line per lane.

    A letter per head stands for computing, ``+`` for adding dq, ``.`` for waiting, and a blank for idle time.  If a
    writer adds while the next tile pair is computed, only the activities of the lane itself are shown.

    Args:
        timeline: the run.
        width: the number of characters for the whole run, in addition to six for the lane number.
    """
    rows = [[" "] * width for _ in timeline.lanes]
    scale = width / timeline.end if timeline.end else 0.0
    for bar in timeline.bars:
        step = timeline.steps[bar.step]
        mark = {"compute": _HEADS[step.head % len(_HEADS)], "wait": ".", "add": "+"}[bar.kind]
        if bar.track == 0:
            for x in range(round(bar.begin * scale), min(width, round(bar.end * scale))):
                rows[step.lane][x] = mark
    lines = [f"{timeline.name}: {summary(timeline)}"]
    lines += [f"{lane:4d}  {''.join(row)}".rstrip() for lane, row in enumerate(rows)]
    return "\n".join(lines) + "\n"
