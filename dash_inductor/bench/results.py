"""The results of a benchmark, as a table, a chart in text, a picture, and plain data."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import ArgumentError, MissingPackageError
from ..records.records import SiteRecord
from ..version import __version__
from .timing import Timing
from .variants import DASH, DEFAULT, DETERMINISTIC, VARIANTS

WIDTH = 100
SUFFIXES = (".png", ".svg", ".pdf")
"""Formats of pictures."""
REPEATS = 5
"""Further calls whose bits are compared with the first one's."""


@dataclass
class Row:
    """One measured workload.

    Attributes:
        name: the workload in words.
        times: the timing of each variant that ran, by the variant's name.
        equal: whether `REPEATS` further calls of it gave the same bits.
        not_run: why a variant did not run.
        kept: why dash_inductor left an attention of the workload to PyTorch; "" if it left none.
    """

    name: str
    times: dict[str, Timing] = field(default_factory=dict)
    equal: dict[str, bool] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    kept: str = ""

    def speedup(self, over: str) -> float | None:
        """How many times as long as dash_inductor another variant takes."""
        if over not in self.times or DASH.name not in self.times:
            return None
        return self.times[over].median / self.times[DASH.name].median

    def note(self, records: Sequence[SiteRecord]) -> None:
        """Take down what dash_inductor left to PyTorch, by the records of its variant."""
        kept = [str(record) for record in records if record.status == "kept"]
        self.kept = "; ".join(kept) if records else "dash_inductor has seen no attention; dash-inductor doctor says why"

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON: milliseconds."""
        times = {name: vars(timing) for name, timing in self.times.items()}
        return {"name": self.name, "ms": times, "same bits": self.equal, "not run": self.not_run, "kept": self.kept}

    @property
    def failed(self) -> bool:
        """Whether dash_inductor did not do its work here."""
        return bool(self.kept) or not self.equal.get(DASH.name, False)


def conditions() -> dict[str, Any]:
    """Versions and device, for the head of every result."""
    import triton

    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "dash_inductor": __version__,
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cudnn"] = torch.backends.cudnn.version()
    return facts


def format_table(rows: Sequence[Row]) -> str:
    """Medians with half the distance of their quartiles, speed-ups, and whose bits are always the same."""
    names = [variant.name for variant in VARIANTS]
    table = [("ms", *names, "x default", "x determ.", "same bits")]
    for row in rows:
        times = [_milliseconds(row.times.get(name)) for name in names]
        ratios = [_ratio(row.speedup(over.name)) for over in (DEFAULT, DETERMINISTIC)]
        same = " ".join({True: "yes", False: "no", None: "-"}[row.equal.get(name)] for name in names)
        table.append((row.name, *times, *ratios, same))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in table)


LEGEND = "\n".join(
    [
        *(f"{variant.name + ':':15}{variant.means}" for variant in VARIANTS),
        "ms:            median of calls that take turns, ± half the distance between the quartiles",
        f"x default:     how many times as fast as the default {DASH.name} is",
        f"x determ.:     how many times as fast as deterministic PyTorch {DASH.name} is",
        f"same bits:     for each of the three, whether {REPEATS} more calls gave the bits of the first",
    ]
)
"""The meaning of the columns."""


def _milliseconds(timing: Timing | None) -> str:
    if timing is None:
        return "-"
    digits = _digits(timing.median)
    return f"{timing.median:.{digits}f} ±{(timing.high - timing.low) / 2:.{digits}f}"


def _digits(value: float) -> int:
    """Decimals with which a number has three digits."""
    return 2 if value < 10 else 1 if value < 100 else 0


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def format_chart(rows: Sequence[Row]) -> str:
    """A bar for every variant of every row, as long as its time beside the slowest of the row."""
    room = WIDTH - 32
    lines = []
    for row in rows:
        lines.append(row.name)
        longest = max((timing.median for timing in row.times.values()), default=1.0)
        for name, timing in row.times.items():
            bar = "█" * max(1, round(room * timing.median / longest))
            lines.append(f"  {name:14} {bar} {timing.median:.{_digits(timing.median)}f} ms")
    return "\n".join(lines)


def check_plot(path: Path) -> None:
    """Find out before the measurement, not after it, whether a picture can be drawn and written to `path`.

    Raises:
        ArgumentError: a suffix that `plot` does not have, or a folder that does not exist.
        MissingPackageError: matplotlib is not installed; the message has the command that installs it.
    """
    if path.suffix not in SUFFIXES or not path.absolute().parent.is_dir():
        raise ArgumentError("--plot", str(path), f"a file ending in {', '.join(SUFFIXES)} in a folder that exists")
    try:
        import matplotlib  # type: ignore[import-not-found, unused-ignore]  # noqa: F401  # optional
    except ImportError:
        raise MissingPackageError("matplotlib", "the pictures of --plot", "pictures") from None


def plot(rows: Sequence[Row], path: Path) -> None:
    """Write a bar chart of the medians; the suffix of the path chooses the format (png, svg or pdf)."""
    check_plot(path)
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    figure = Figure(figsize=(2 + 1.6 * len(rows), 5), layout="constrained")
    axes = figure.subplots()
    longest = [max((timing.median for timing in row.times.values()), default=1.0) for row in rows]
    for place, variant in enumerate(VARIANTS):
        there = [(i, row.times[variant.name]) for i, row in enumerate(rows) if variant.name in row.times]
        bars = axes.bar(
            [i + 0.27 * (place - 1) for i, _ in there],
            [timing.median / longest[i] for i, timing in there],
            0.25,
            label=f"{variant.name}: {variant.means}",
        )
        labels = [f"{timing.median:.{_digits(timing.median)}f}" for _, timing in there]
        axes.bar_label(bars, labels, fontsize=7, padding=2)
    axes.set_xticks(range(len(rows)), [row.name for row in rows], rotation=20, ha="right")
    axes.set_xlim(-0.5, len(rows) - 0.5)
    axes.set_ylabel("time beside the slowest; the numbers are ms")
    figure.legend(loc="outside upper left", frameon=False)
    figure.savefig(path, dpi=150)
