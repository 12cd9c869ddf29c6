"""Pictures of a simulated run: text for terminals, SVG for pages."""

from __future__ import annotations

from .simulator import Run

_HEADS = "abcdefghijklmnopqrstuvwxyz"
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")


def _extent(run: Run) -> tuple[int, float]:
    """Number of worker rows and the end of the last span."""
    return 1 + max((s.worker for s in run.spans), default=-1), max((s.written for s in run.spans), default=0.0)


def text(run: Run, width: int = 100) -> str:
    """One line per worker: a letter per head while computing, ``+`` while adding dq, ``.`` while idle or waiting."""
    workers, end = _extent(run)
    rows = [["."] * width for _ in range(workers)]
    scale = width / end if end else 0.0
    for s in run.spans:
        letter = _HEADS[s.accumulator[0] % len(_HEADS)]
        for begin, stop, mark in ((s.write, s.written, "+"), (s.start, s.computed, letter)):
            for x in range(round(begin * scale), min(width, round(stop * scale))):
                rows[s.worker][x] = mark
    lines = [f"{w:4d} {''.join(row)}" for w, row in enumerate(rows)]
    if run.unfinished:
        lines.append(f"hangs: tickets {', '.join(map(str, run.unfinished))} never finish")
    else:
        lines.append(f"makespan {run.makespan:g}")
    return "\n".join(lines) + "\n"


def svg(run: Run, width: int = 1000, row: int = 14) -> str:
    """An SVG image: a bar per tile pair (colour: head), a dark bar while adding dq; hovering names the pair."""
    workers, end = _extent(run)
    scale = width / end if end else 0.0
    title = "hangs" if run.unfinished else f"makespan {run.makespan:g}"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{workers * row}"><title>{title}</title>']
    for s in run.spans:
        head, g, q = s.accumulator
        label = f"head {head}.{g} kv {s.kv} q {q} rank {s.rank}"
        for begin, stop, colour in ((s.start, s.computed, _COLOURS[head % 6]), (s.write, s.written, "#333333")):
            size = (
                f'x="{begin * scale:.2f}" y="{s.worker * row}" width="{(stop - begin) * scale:.2f}" height="{row - 2}"'
            )
            parts.append(f'<rect {size} fill="{colour}"><title>{label}: {begin:g} to {stop:g}</title></rect>')
    return "\n".join([*parts, "</svg>\n"])
