"""Writes the tables of docs/schedules.md that hold the predicted times against the measured ones.

    python -m tools.predictions [--fit]

`--fit` prints constants for `dash_inductor.planning.calibration` that are fitted anew: least squares of the relative
errors over the shapes whose length is in `FITTED`.  The other shapes are held out.

Backwards under schedules that planning does not have are left out, and so are those under `bent_fold` where walks are
too short to be bent: there the results hold another rule than `spt`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.documents import packed
from dash_inductor.model import Band, Call, Mask, Plan, Site
from dash_inductor.planning import plan, prediction
from dash_inductor.planning.calibration import CALIBRATIONS, Backward, Forward
from dash_inductor.schedule.names import NAMES
from dash_inductor.schedule.schedules import LEAST

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / "docs" / "schedules.md", ROOT / "benchmarks" / "results"
FITTED = (1024, 4096, 16384)
"""Lengths of the shapes to which the constants are fitted."""
BOUND = 0.05
"""Largest relative error that a prediction may have."""
APART = 0.02
"""Times that differ by no more than this may have any order: repeated runs differ by as much."""


@dataclass(frozen=True)
class Point:
    """One measurement.

    Args:
        shape: its name, as in the results.
        forward: whether it is a forward.
        us: measured time in microseconds.
        clock: by what it has been divided: how much longer a regular shape took in the same run than in
            backward.json.  Clocks of a GPU at its power limit change from run to run.
        documents: lengths of packed documents.
    """

    gpu: str
    shape: str
    site: Site
    schedule: str
    forward: bool
    us: float
    clock: float = 1.0
    documents: tuple[int, ...] | None = None

    @property
    def length(self) -> int:
        assert self.site.q_len is not None
        return self.site.q_len

    @property
    def dims(self) -> tuple[int, int]:
        return self.site.head_dim, self.site.value_dim

    @property
    def fitted(self) -> bool:
        """The constants were fitted to it.

        Where few shapes have been measured all are: backwards with heads of 192, with grouped heads on an H200, and
        with CTAs that run all at once.  What ran beside data masks is held out.
        """
        grouped = self.gpu == "H200" and self.site.group > 1 and self.documents is None
        alone = self.dims == (192, 128) or self.shape == ALONE or grouped
        return not self.shape.startswith("beside") and (self.length in FITTED or (alone and not self.forward))

    @property
    def plan(self) -> Plan:
        return plan(self.site, "sm_90", self.schedule)

    @property
    def predicted(self) -> float:
        if self.forward:
            us = prediction.predicted_forward_us(self.plan, self.site, "sm_90", self.gpu)
        else:
            us = prediction.predicted_us(self.plan, self.site, "sm_90", self.gpu, self.documents)
        if us is None:
            raise SystemExit(f"{self.shape}: {prediction.unknown(self.plan, self.site, 'sm_90', self.gpu)}")
        return us

    @property
    def ratio(self) -> float:
        return self.predicted / self.us


CLOSED_FORMS = {
    "padded:6000 and 7800 of 8192": "beside:d128:full:b2h16:s8192",
    "dense:causal 4096": "beside:d128:causal:b2h16:s4096",
    "dropout:causal 8192": "beside:d128:causal:b2h16:s8192",
}
"""Shapes of masks.json, and that of the plain mask which ran beside each."""

DOCUMENTS = {
    "documents:16 in 32k": ("packed:d128:causal & segments(0,0):b1h32/8:s32768", 16),
    "documents:8 in 16k": ("packed:d128:causal & segments(0,0):b1h16/4:s16384", 8),
    "documents:64 in 32k": ("packed:d128:causal & segments(0,0):b1h32/8:s32768", 64),
}
"""Shapes of masks.json with packed documents, as shapes, and how many there are."""

RATES = {"schedules_few": "H100", "schedules": "H200", "backward_h200": "H200"}
"""Results in TFLOP/s by schedule, and their GPUs."""

ALONE = "few:d128:causal:b1h2:s8192"


def site_of(shape: str) -> Site:
    """The site of a shape by its name, as `benchmarks.shapes` makes them."""
    match = re.fullmatch(r"\w+:d(\d+)(?:/(\d+))?:(.+):b(\d+)h(\d+)(?:/(\d+))?:s(\d+)", shape)
    if match is None:
        raise SystemExit(f"no shape: {shape}")
    dim, heads, length = int(match[1]), int(match[5]), int(match[7])
    call = Call(Mask.parse(match[3]), dim**-0.5)
    kv_heads, value_dim = int(match[6] or heads), int(match[2] or dim)
    return Site("cuda", "bfloat16", int(match[4]), heads, kv_heads, length, length, dim, value_dim, call)


def _rows(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return rows


def _microseconds(site: Site, rate: float) -> float:
    """Time of a backward at a rate in TFLOP/s, which counts half of all pairs of a causal mask."""
    assert site.batch is not None
    assert site.q_len is not None
    pairs = site.batch * site.q_heads * site.q_len**2
    return (10 if site.band.is_full else 5) * pairs * site.head_dim / rate / 1e6


def points() -> list[Point]:
    """All measurements."""
    found = []
    regular: dict[tuple[int, Band, int | None], float] = {}
    for row in _rows("backward"):
        site, schedule = site_of(row["shape"]), row["plan"].split("/")[1]
        regular[site.head_dim, site.band, site.q_len] = row["ms"]["dash"]
        found.append(Point("H100", row["shape"], site, schedule, False, row["ms"]["dash"] * 1e3))
    for row in _rows("also"):
        site, schedule = site_of(row["shape"]), row["plan"].split("/")[1]
        clock = row["ms"]["regular"] / regular[_beside(site)]
        found.append(Point("H100", row["shape"], site, schedule, False, row["ms"]["dash"] * 1e3 / clock, clock))
    for name, gpu in RATES.items():
        for row in _rows(name):
            site = site_of(row["shape"])
            for schedule in (s for s in NAMES if s in row and s != "symmetric_shift"):  # nothing is predicted of that
                p = Point(gpu, row["shape"], site, schedule, False, _microseconds(site, row[schedule]))
                if schedule != "bent_fold" or p.length >= LEAST * p.plan.dkdv.block_q:
                    found.append(p)
    for row in _rows("masks"):
        if row["shape"] in CLOSED_FORMS:
            name = CLOSED_FORMS[row["shape"]]
            site = site_of(name)
            schedule, (forward, backward) = plan(site, "sm_90").schedule, row["ms"]["closed form"]
            found.append(Point("H200", name, site, schedule, True, forward * 1e3))
            if site.band.is_full:  # the file does not say under which schedule the others ran
                found.append(Point("H200", name, site, schedule, False, backward * 1e3))
        if row["shape"] in DOCUMENTS:
            name, count = DOCUMENTS[row["shape"]]
            site = site_of(name)
            ends = packed(count, site.q_len or 0)
            lengths = tuple(end - start for start, end in zip((0, *ends), ends, strict=False))
            schedule, us = plan(site, "sm_90").schedule, row["ms"]["dash"][1] * 1e3
            found.append(Point("H200", name, site, schedule, False, us, documents=lengths))
    for row in _rows("forward"):
        site = site_of(row["shape"])
        found.append(Point("H200", row["shape"], site, plan(site, "sm_90").schedule, True, row["ms"]["dash"] * 1e3))
    return [p for p in found if p.schedule in NAMES]


def _beside(site: Site) -> tuple[int, Band, int]:
    """Mask and length of the regular shape that ran beside a shape of also.json, as in `benchmarks.shapes`."""
    assert site.q_len is not None
    if site.band.hi is not None:
        return 128, Band(0), 2048
    return 128, site.band, min(16384, 1 << (site.q_len - 1).bit_length())


def fit(data: Sequence[Point], constants: Any, names: Sequence[str], predict: Callable[[Point, Any], float]) -> Any:
    """The constants `names`, none below 0, with the least squares of relative errors: Levenberg-Marquardt."""
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
    """Prints all constants anew, beginning with those that there are."""

    def backward(p: Point, rates: Backward) -> float:
        calibration = CALIBRATIONS[p.gpu]
        return prediction.backward_us(p.plan, p.site, replace(calibration, backward={p.dims: rates}), p.documents)

    def forward(p: Point, rates: Forward) -> float:
        return prediction.forward_us(p.plan, p.site, rates)

    for gpu, calibration in CALIBRATIONS.items():
        data = [p for p in points() if p.gpu == gpu and p.fitted and p.shape != ALONE]
        for dims, rates in calibration.backward.items():
            backwards = [p for p in data if not p.forward and p.dims == dims]
            names = ["step"] if len(backwards) == 1 else ["step", "masked", "cta"]
            names += ["group"] if any(p.site.group > 1 for p in backwards) else []
            names += ["down", "bent"] if any(p.schedule == "bent_fold" for p in backwards) else []
            print(gpu, dims, fit(backwards, rates, names, backward), flush=True)
        for kind, forward_rates in calibration.forward.items():
            forwards = [p for p in data if p.forward and (*p.dims, prediction.is_window(p.site)) == kind]
            names = ["step", "tile"] if kind[2] else ["step", "masked", "tile", "launch"]
            print(gpu, kind, fit(forwards, forward_rates, names, forward), flush=True)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [" | ".join(head), "|".join(["---"] * len(head)), *(" | ".join(row) for row in rows)]
    return f"| {lines[0]} |\n|{lines[1]}|\n" + "".join(f"| {line} |\n" for line in lines[2:])


def _dims(p: Point) -> str:
    dim, value_dim = p.dims
    return f"{dim}" if dim == value_dim else f"{dim}/{value_dim}"


def _mask(p: Point) -> str:
    if p.documents is not None:
        return f"{p.site.band} and {len(p.documents)} documents"
    return str(p.site.band) if p.site.band.hi is None else f"window {p.site.band.hi + 1}"


def _heads(p: Point) -> str:
    return f"{p.site.q_heads}" if p.site.group == 1 else f"{p.site.q_heads}/{p.site.kv_heads}"


def backwards(found: Sequence[Point]) -> str:
    """A row for every shape: the planned schedule, and how far the others are off."""
    rows = []
    some = [p for p in found if not p.forward]
    for gpu, shape, documents in dict.fromkeys((p.gpu, p.shape, p.documents) for p in some):
        those = [p for p in some if (p.gpu, p.shape, p.documents) == (gpu, shape, documents)]
        planned = plan(those[0].site, "sm_90").schedule
        first, *others = sorted(those, key=lambda p: p.schedule != planned)
        what = f"{_dims(first)} {_mask(first)}, {first.site.batch} x {_heads(first)}, {first.length}"
        run = "" if first.clock < 1.005 else f" ({first.us * first.clock:.0f} / {first.clock:.2f})"
        times = f"{first.us:.0f}{run}", f"{first.predicted:.0f}", f"{first.ratio:.3f}"
        rest = ", ".join(f"`{p.schedule}` {p.ratio:.3f}" for p in others)
        rows.append((gpu, what, f"`{first.schedule}`", *times, rest, "fitted" if first.fitted else "held out"))
    head = (
        "GPU", "head dim, mask, batch x heads, length", "schedule", "measured", "predicted", "predicted / measured",
        "of other schedules", "",
    )  # fmt: skip
    return _table(head, rows)


def forwards(found: Sequence[Point]) -> str:
    """A row for every kind of forward, a column for every length, and how far the predictions are off."""
    kinds: dict[tuple[str, str], dict[int, str]] = {}
    for p in found:
        if p.forward:
            beside = ", beside data masks" if p.shape.startswith("beside") else ""
            kind = kinds.setdefault((f"{_dims(p)} {_mask(p)}{beside}", _heads(p)), {})
            kind[p.length] = f"{p.ratio:.3f}"
    lengths = sorted({n for ratios in kinds.values() for n in ratios})
    rows = [(*kind, *(ratios.get(n, "") for n in lengths)) for kind, ratios in kinds.items()]
    return _table(("head dim, mask", "heads", *map(str, lengths)), rows)


def pairs(found: Sequence[Point]) -> list[tuple[Point, Point]]:
    """All pairs of schedules that were measured at one shape on one GPU, the faster one first."""
    some = [p for p in found if not p.forward]
    return [
        (p, other) for p in some for other in some
        if (p.gpu, p.shape, p.documents) == (other.gpu, other.shape, other.documents) and p.us < other.us
    ]  # fmt: skip


def text(found: Sequence[Point]) -> str:
    """What stands in the page between the marks."""
    worst = max(found, key=lambda p: abs(p.ratio - 1))
    held = [p for p in found if not p.fitted]
    if abs(worst.ratio - 1) > BOUND:
        raise SystemExit(f"{worst.gpu} {worst.shape} {worst.schedule}: {worst.ratio:.3f} is off by more than {BOUND}")
    mean, mean_held = (100 * float(np.mean([abs(p.ratio - 1) for p in some])) for some in (found, held))
    apart = [(fast, slow) for fast, slow in pairs(found) if slow.us / fast.us - 1 > APART]
    right = sum(fast.predicted < slow.predicted for fast, slow in apart)
    return (
        f"Of {len(found)} measurements {len(held)} are held out. Predictions are off by {mean:.1f} % on average,"
        f" by {mean_held:.1f} % for those held out, and by at most {100 * abs(worst.ratio - 1):.1f} %."
        f" Of {len(apart)} pairs of schedules that differ by more than {100 * APART:.0f} % at a shape, {right} are"
        " predicted in the right order.\n\n"
        f"Backwards, in microseconds:\n\n{backwards(found)}\n"
        f"Forwards on an H200, 16384 tokens, predicted / measured by length:\n\n{forwards(found)}"
    )


BEGIN, END = "<!-- predictions: written by tools/predictions.py -->\n", "<!-- end of predictions -->"


def filled(page: str) -> str:
    """The page with its tables written anew."""
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
