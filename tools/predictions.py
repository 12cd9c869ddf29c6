"""Writes the tables of docs/schedules.md that hold the predicted times against the measured ones.

    python -m tools.predictions [--fit]

`--fit` prints constants for `kernels.hopper.calibration` that are fitted anew: least squares of the relative
errors over the shapes whose length is in `FITTED`.  The other shapes are held out.

The backwards are from the results in `BACKWARDS`, all under the planned schedule.  The forwards are from those in
`FORWARDS`, and from masks.json under plain masks.  Everything ran on H200s.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shapes import SHAPES
from dash_inductor.kernels.hopper.calibration import CALIBRATIONS, Backward, Forward
from dash_inductor.kernels.hopper.prediction import backward_us, forward_us
from dash_inductor.model import AttentionSpec, Mask, Plan, Site
from dash_inductor.planning import plan, prediction

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / "docs" / "schedules.md", ROOT / "benchmarks" / "results"
FITTED = (1024, 4096, 16384)
"""Lengths of the shapes to which the constants are fitted."""
BOUND = 0.05
"""Largest relative error that a prediction may have."""
BACKWARDS = {
    "backward_rivals": "by turns",
    "backward_rivals_also": "by turns",
    "backward_alone": "alone",
}
"""Results of backwards, and how they ran: by turns with other libraries' backwards, or with the regular shape alone."""
FORWARDS = "forward", "forward_narrow"
"""Results of forwards."""


@dataclass(frozen=True)
class Point:
    """One measurement.

    Args:
        shape: its name, as in the results.
        schedule: the one that ran, None for a forward.
        us: measured time in microseconds.
        run: how it ran, in words.
        clock: by what it has been divided: how much longer a regular shape took beside it than in
            backward_rivals.json.  Clocks of a GPU at its power limit change with what ran before.
    """

    shape: str
    site: Site
    schedule: str | None
    us: float
    run: str = ""
    clock: float = 1.0

    @property
    def forward(self) -> bool:
        return self.schedule is None

    @property
    def length(self) -> int:
        assert self.site.q_len is not None
        return self.site.q_len

    @property
    def dims(self) -> tuple[int, int]:
        return self.site.head_dim, self.site.value_dim

    @property
    def fitted(self) -> bool:
        """Whether the constants were fitted to this point.  Forwards measured together with data masks are held out."""
        return self.length in FITTED and not self.shape.startswith("beside")

    @property
    def plan(self) -> Plan:
        return plan(self.site, "sm_90", self.schedule)

    @property
    def predicted(self) -> float:
        predict = prediction.predicted_forward_us if self.forward else prediction.predicted_us
        us = predict(self.plan, self.site, "sm_90")
        assert us is not None, self.shape
        return us

    @property
    def ratio(self) -> float:
        return self.predicted / self.us


CLOSED_FORMS = {
    "padded:6000 and 7800 of 8192": "beside:d128:full:b2h16:s8192",
    "dense:causal 4096": "beside:d128:causal:b2h16:s4096",
    "dropout:causal 8192": "beside:d128:causal:b2h16:s8192",
}
"""Shapes of masks.json, and the shape with a plain mask whose forward ran beside each."""


def site_of(shape: str) -> Site:
    """The site of a shape by its name, as `benchmarks.shapes` makes them."""
    match = re.fullmatch(r"\w+:d(\d+)(?:/(\d+))?:(.+):b(\d+)h(\d+)(?:/(\d+))?:s(\d+)", shape)
    if match is None:
        raise SystemExit(f"no shape: {shape}")
    dim, heads, length = int(match[1]), int(match[5]), int(match[7])
    spec = AttentionSpec(Mask.parse(match[3]), dim**-0.5)
    kv_heads, value_dim = int(match[6] or heads), int(match[2] or dim)
    return Site("cuda", "bfloat16", int(match[4]), heads, kv_heads, length, length, dim, value_dim, spec)


def _rows(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return rows


def points() -> list[Point]:
    """Returns all measurements at calibrated head dims."""
    found = []
    regular = {row["shape"]: row["ms"]["dash"] for row in _rows("backward_rivals")}
    for name, run in BACKWARDS.items():
        for row in _rows(name):
            site, schedule, ms = site_of(row["shape"]), row["plan"].split("/")[1], row["ms"]
            beside = SHAPES[row["shape"]].regular
            clock = ms["regular"] / regular[beside] if beside else 1.0
            if (site.head_dim, site.value_dim) in CALIBRATIONS[prediction.GPU].backward:
                found.append(Point(row["shape"], site, schedule, ms["dash"] * 1e3 / clock, run, clock))
    for row in _rows("masks"):
        if row["shape"] in CLOSED_FORMS:
            name = CLOSED_FORMS[row["shape"]]
            found.append(Point(name, site_of(name), None, row["ms"]["closed form"][0] * 1e3))
    for row in (row for name in FORWARDS for row in _rows(name) if not row["shape"].startswith("short:")):
        found.append(Point(row["shape"], site_of(row["shape"]), None, row["ms"]["dash"] * 1e3))
    return found


def fit(data: Sequence[Point], constants: Any, names: Sequence[str], predict: Callable[[Point, Any], float]) -> Any:
    """Fits the constants `names`, all >= 0, by least squares of relative errors (Levenberg-Marquardt)."""
    measured = np.array([p.us for p in data])

    def errors(values: Any) -> Any:
        now = replace(constants, **dict(zip(names, map(float, values), strict=True)))
        return np.array([predict(p, now) for p in data]) / measured - 1

    x = np.array([getattr(constants, name) for name in names])
    r, damping = errors(x), 1e-3
    for _ in range(15):
        jacobian = np.empty((len(r), len(x)))
        for i in range(len(x)):
            moved = x.copy()
            moved[i] += 0.01 + 0.02 * abs(x[i])
            jacobian[:, i] = (errors(moved) - r) / (moved[i] - x[i])
        square = jacobian.T @ jacobian
        step = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-9), -jacobian.T @ r)
        y = np.maximum(x + step, 0.0)
        better = errors(y)
        if better @ better < r @ r:
            x, r, damping = y, better, damping / 3
        else:
            damping *= 5
    return replace(constants, **dict(zip(names, (round(float(v), 3) for v in x), strict=True)))


def fit_all() -> None:
    """Prints newly fitted constants, starting from the present ones.

    Backward constants that are 0 stay 0; where only one shape was fitted, all but `step` stay as they are.
    """

    calibration = CALIBRATIONS[prediction.GPU]

    def backward(p: Point, rates: Backward) -> float:
        return backward_us(p.plan, p.site, replace(calibration, backward={p.dims: rates}))

    def forward(p: Point, rates: Forward) -> float:
        return forward_us(p.plan, p.site, rates)

    data = [p for p in points() if p.fitted]
    for dims, rates in calibration.backward.items():
        backwards = [p for p in data if not p.forward and p.dims == dims]
        names = ["step"] if len(backwards) == 1 else [n for n, value in asdict(rates).items() if value]
        print(dims, fit(backwards, rates, names, backward), flush=True)
    for kind, forward_rates in calibration.forward.items():
        forwards = [p for p in data if p.forward and (*p.dims, p.site.band.is_window) == kind]
        names = ["step", "tile"] if kind[2] else ["step", "masked", "tile", "launch"]
        print(kind, fit(forwards, forward_rates, names, forward), flush=True)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [" | ".join(head), "|".join(["---"] * len(head)), *(" | ".join(row) for row in rows)]
    return f"| {lines[0]} |\n|{lines[1]}|\n" + "".join(f"| {line} |\n" for line in lines[2:])


def _dims(p: Point) -> str:
    dim, value_dim = p.dims
    return f"{dim}" if dim == value_dim else f"{dim}/{value_dim}"


def _mask(p: Point) -> str:
    return str(p.site.band) if p.site.band.hi is None else f"window {p.site.band.hi + 1}"


def _heads(p: Point) -> str:
    return f"{p.site.q_heads}" if p.site.group == 1 else f"{p.site.q_heads}/{p.site.kv_heads}"


def backwards(found: Sequence[Point]) -> str:
    """Returns a table row per measured backward."""
    rows = []
    for p in found:
        if not p.forward:
            what = f"{_dims(p)} {_mask(p)}, {p.site.batch} x {_heads(p)}, {p.length}"
            raw = "" if abs(p.clock - 1) < 0.005 else f" ({p.us * p.clock:.0f} / {p.clock:.2f})"
            times = f"{p.us:.0f}{raw}", f"{p.predicted:.0f}", f"{p.ratio:.3f}"
            rows.append((what, f"`{p.schedule}`", p.run, *times, "fitted" if p.fitted else "held out"))
    head = (
        "head dim, mask, batch x heads, length", "schedule", "ran", "measured", "predicted", "predicted / measured", "",
    )  # fmt: skip
    return _table(head, rows)


def forwards(found: Sequence[Point]) -> str:
    """Returns a table row per kind of forward, with a column per length and the prediction errors."""
    kinds: dict[tuple[str, str], dict[int, str]] = {}
    for p in found:
        if p.forward:
            beside = ", beside data masks" if p.shape.startswith("beside") else ""
            kind = kinds.setdefault((f"{_dims(p)} {_mask(p)}{beside}", _heads(p)), {})
            kind[p.length] = f"{p.ratio:.3f}"
    lengths = sorted({n for ratios in kinds.values() for n in ratios})
    rows = [(*kind, *(ratios.get(n, "") for n in lengths)) for kind, ratios in kinds.items()]
    return _table(("head dim, mask", "heads", *map(str, lengths)), rows)


def text(found: Sequence[Point]) -> str:
    """Returns the text between the markers in the page."""
    worst = max(found, key=lambda p: abs(p.ratio - 1))
    held = [p for p in found if not p.fitted]
    if abs(worst.ratio - 1) > BOUND:
        raise SystemExit(f"{worst.shape} {worst.schedule}: {worst.ratio:.3f} is off by more than {BOUND}")
    mean, mean_held = (100 * float(np.mean([abs(p.ratio - 1) for p in some])) for some in (found, held))
    return (
        f"Of {len(found)} measurements {len(held)} are held out. Predictions are off by {mean:.1f} % on average,"
        f" by {mean_held:.1f} % for those held out, and by at most {100 * abs(worst.ratio - 1):.1f} %.\n\n"
        f"Backwards on an H200, in microseconds:\n\n{backwards(found)}\n"
        f"Forwards on an H200, 16384 tokens, predicted / measured by length:\n\n{forwards(found)}"
    )


BEGIN, END = "<!-- predictions: written by tools/predictions.py -->\n", "<!-- end of predictions -->"


def filled(page: str) -> str:
    """Returns the page with updated tables."""
    head, rest = page.split(BEGIN)
    return head + BEGIN + "\n" + text(points()) + "\n" + END + rest.split(END, 1)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="print constants that are fitted anew, and write nothing")
    if parser.parse_args().fit:
        fit_all()
        return
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
