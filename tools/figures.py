"""Draw the pictures of schedules in docs/figures: ``python tools/figures.py``."""

from __future__ import annotations

from pathlib import Path

from dash_inductor.model.mask import Band
from dash_inductor.schedule.simulator import Costs
from dash_inductor.schedule.walk import Problem
from dash_inductor.timeline.image import image
from dash_inductor.timeline.model import Picture
from dash_inductor.timeline.simulated import timeline

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
FULL, CAUSAL = Band(), Band(0)


def small(title: str, band: Band, *names: str) -> Picture:
    """The DASH paper's example: four q tiles and four kv tiles, here of two heads, in the paper's model."""
    problem = Problem(band, 4, 4, 1, 1, heads=2)
    runs = tuple(timeline(name, problem, 4, Costs(1.0, 0.5)) for name in names)
    return Picture(title, "Four kv tiles, two heads, four workers; adding a dQ tile takes 0.5.", runs)


def large() -> Picture:
    """Eight heads of 4096 tokens on 132 workers with separate writers, as on an H100."""
    problem = Problem(CAUSAL, 4096, 4096, 64, 128, heads=8, section=4)
    prices = Costs(1.0, 0.3, 0.3, epilogue=3.0, depth=2)
    runs = tuple(timeline(name, problem, 132, prices) for name in ("bent_fold", "spt", "descending", "ascending"))
    subtitle = "8 heads of 4096 tokens, tiles of 64 queries and 128 keys, 132 workers with writers of their own"
    return Picture("Causal mask, at a realistic size", subtitle, runs)


def figures() -> dict[str, str]:
    """The text of every file of docs/figures that is drawn here."""
    pictures = {
        "schedules_full.svg": small("Full mask", FULL, "ascending", "shift"),
        "schedules_causal.svg": small("Causal mask", CAUSAL, "ascending", "descending", "symmetric_shift", "spt"),
        "schedules_large.svg": large(),
    }
    return {name: image(picture, "svg").decode() for name, picture in pictures.items()}


def main() -> None:
    FIGURES.mkdir(exist_ok=True)
    for name, text in figures().items():
        (FIGURES / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
