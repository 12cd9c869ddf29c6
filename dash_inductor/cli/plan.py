"""``dash-inductor plan``: prints the plan for a shape and a mask, with all candidates, and draws their timelines."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from ..explanations import text_blocks
from ..explanations.text_blocks import Fields, Heading, Table
from ..model.plan import Fallback, Plan
from ..planning import planner, prediction
from ..planning.ranking import Candidacy, rank
from ..schedule.schedules import NAMES
from ..timeline import files, planned
from ..timeline.simulated import TILE_PAIRS
from . import outputs, site_arguments
from .site_arguments import Request

MOST_WORKERS = 4096
"""The maximum number of workers of a timeline, more than the SMs of any GPU."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``dash-inductor plan``."""
    site_arguments.add_arguments(parser)
    parser.add_argument("--schedule", metavar="NAME", help=f"plan with this schedule: {', '.join(NAMES)}")
    parser.add_argument(
        "--timeline", action="append", default=[], type=Path, metavar="FILE",
        help="draw workers over time for every schedule, may be repeated:\n"
        ".svg and .png images (need matplotlib), .txt text,\n.json a trace for Perfetto and chrome://tracing",
    )  # fmt: skip
    parser.add_argument(
        "--draw", default="", metavar="NAME,NAME", help="draw these schedules, by default all of the chosen kernels"
    )
    parser.add_argument("--measured", type=Path, metavar="FILE", help="draw this recorded run beside the prediction")
    parser.add_argument("--workers", type=int, metavar="N", help="workers of the timelines, instead of the GPU's SMs")


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan and the ranking of candidates, and writes the requested timelines to files.

    Returns:
        The exit status: 1 if no kernel covers the site, else 0.
    """
    asked = site_arguments.request(arguments)
    if arguments.workers is not None and not 1 <= arguments.workers <= MOST_WORKERS:
        raise ArgumentError("workers", arguments.workers, f"a number from 1 to {MOST_WORKERS}")
    for path in arguments.timeline:
        files.check_path(path)
        outputs.check("timeline", path)
    for name in ("measured", "draw", "workers"):
        if getattr(arguments, name) and not arguments.timeline:
            raise ArgumentError(name, str(getattr(arguments, name)), "an argument beside --timeline, which draws")
    found = planner.decide(asked.site, asked.arch)
    if not isinstance(found, Fallback):
        found = planner.plan(asked.site, asked.arch, arguments.schedule)
    gpu = asked.gpu or prediction.GPU
    ranking = rank(asked.site, asked.arch, arguments.schedule, gpu=gpu, documents=asked.documents)
    if arguments.timeline and isinstance(found, Plan):
        try:
            picture = planned.picture(
                asked.site, asked.arch, ranking, draw=tuple(filter(None, arguments.draw.split(","))), data=asked.data,
                gpu=gpu, workers=arguments.workers, recorded=arguments.measured, say=_say,
            )  # fmt: skip
        except ArgumentError as error:
            if error.name != TILE_PAIRS:
                raise
            allowed = f"a timeline with {error.allowed}"
            raise ArgumentError("shape", arguments.shape, allowed) from error
        for path in arguments.timeline:
            _say(f"drawing {path}")
            files.write(picture, path)
    if arguments.json:
        print(json.dumps(_document(asked, found, ranking, arguments.timeline), indent=2))
    else:
        _print(asked, found, ranking, arguments.timeline)
    return int(isinstance(found, Fallback))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _document(asked: Request, found: Plan | Fallback, ranking: Sequence[Candidacy], written: Sequence[Path]) -> Any:
    fallback = {"reason": found.reason.value, "detail": found.detail} if isinstance(found, Fallback) else None
    return {
        "site": {**dataclasses.asdict(asked.site), "spec": str(asked.site.spec)},
        "device": asked.device,
        "arch": asked.arch,
        "measured_on": asked.gpu,
        "plan": _plain(found) if isinstance(found, Plan) else None,
        "fallback": fallback,
        "candidates": [_plain(candidacy) for candidacy in ranking],
        "timelines": [str(path) for path in written] if fallback is None else [],
    }


def _plain(value: Plan | Candidacy) -> dict[str, Any]:
    """The fields of a plan or candidate, with plans and tiles as text."""
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    plain = {name: x if isinstance(x, (str, int, float, type(None))) else str(x) for name, x in fields.items()}
    return {"text": str(value), **plain} if isinstance(value, Plan) else plain


def _print(asked: Request, found: Plan | Fallback, ranking: Sequence[Candidacy], written: Sequence[Path]) -> None:
    arch = f" ({asked.arch})" if asked.arch != asked.device else ""
    facts = [("site", f"{planned.in_words(asked.site)}, on {asked.device}{arch}")]
    if isinstance(found, Fallback):
        facts.append(("not replaced", f"{found.reason.explanation} {found.detail}"))
    else:
        where = found, asked.site, asked.arch, asked.gpu or prediction.GPU
        times = {
            "backward": prediction.predicted_us(*where, asked.documents),
            "forward": prediction.predicted_forward_us(*where),
        }
        known = [f"{name} {time:,.0f} µs" for name, time in times.items() if time is not None]
        unknown = prediction.unknown(*where, asked.documents)
        tiles = f"tiles {found.dkdv}" + (f" and {found.dq} for dq" if found.dq else "")
        facts += [
            (
                "backward",
                f"{found.kernel} kernels, schedule {found.schedule}, {tiles}, head chunks of {found.head_chunk}",
            ),
            ("forward", f"{found.forward} kernels, tiles {found.forward_tiles}"),
            ("predicted", "; ".join(known + ([f"backward unknown: {unknown}"] if unknown else []))),
            ("numerics", f"{found.numerics_key}, and the compiler's settings"),
            ("plan", str(found)),
        ]
    rows = tuple(planned.row(candidacy) for candidacy in ranking)
    head = tuple(f">{name}" if name == "predicted" else name for name in planned.HEAD)
    measured = f", from times measured on {asked.gpu}" if asked.gpu not in (None, asked.device) else ""
    legend = Heading(f"* chosen; predicted: the backward of this site on {asked.device}{measured}")
    print(text_blocks.text([Fields(tuple(facts)), Table(head, rows), legend], outputs.columns()))
    for path in written if isinstance(found, Plan) else ():
        print(f"drawn: {path}")
