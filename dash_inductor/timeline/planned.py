"""Draws the timelines of a site's candidates, and optionally a recorded run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import ArgumentError
from ..model.architectures import WORKERS, tables_of
from ..model.components import COMPONENTS
from ..model.site import Site
from ..planning.prediction import GPU
from ..planning.ranking import Candidacy, chosen_of
from . import measured
from .lengths import Lengths
from .model import MICROSECONDS, Picture, Timeline
from .simulated import of_plan, query_heads

HEAD = ("", "schedule", "kernel", "tiles", "predicted", "why")
"""The column headings of `row`."""

SIZES = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim")
"""The sizes that a recorded run must share with the site."""


def picture(
    site: Site,
    arch: str,
    ranking: Sequence[Candidacy],
    *,
    draw: Collection[str] = (),
    data: Lengths | None = None,
    gpu: str = GPU,
    workers: int | None = None,
    recorded: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Picture:
    """Simulates a site's candidates that can run; returns their timelines, best first, after a recorded run if given.

    If the chosen candidate has a prediction, times are in microseconds: each run is scaled to its predicted time, and
    runs without a prediction get the scale of the chosen one.  If it has none but there is a recorded run, the chosen
    one is scaled to the recorded time.  Otherwise times are in the planner's unit.  Predictions are for the GPU's own
    number of workers, and of data-dependent masks only for valid keys.

    Args:
        site: a site with static lengths and batch size.
        arch: as for `planner.plan`.
        ranking: the result of `ranking.rank` for the site.
        draw: the schedules to draw, those of the chosen kernel family if it has them; by default all of that family.
        data, gpu, workers: as for `simulated.of_plan`.
        recorded: a file for `measured.read`.
        say: is called with a line about each simulation, before it.

    Raises:
        ArgumentError: a schedule cannot run at the site, no candidate can, or as for `of_plan` and `measured.read`.
    """
    able = [c for c in ranking if c.plan is not None]
    for name in draw:
        if name not in {c.schedule for c in able}:
            raise ArgumentError("draw", name, sorted({str(c.schedule) for c in able}))
    chosen = chosen_of(tuple(ranking))
    own_schedules = {c.schedule for c in able if c.kernel == chosen.kernel}
    drawn = [
        c
        for c in able
        if (c.kernel == chosen.kernel or c.schedule not in own_schedules)
        and (c.schedule in draw if draw else c.kernel == chosen.kernel)
    ]
    real = None
    if recorded is not None:
        assert site.batch is not None
        sizes = {name: getattr(site, name) for name in SIZES}
        real = measured.read(recorded, query_heads(site.batch, site.q_heads), sizes)
    runs = []
    for number, c in enumerate(drawn, start=1):
        say(f"simulating {c.kernel} {c.schedule}, {number} of {len(drawn)}")
        runs.append(_run(site, arch, c, chosen, data, gpu, workers))
    own = _run(site, arch, chosen, chosen, data, gpu, workers) if chosen not in drawn else runs[drawn.index(chosen)]
    applies = workers is None and (data is None or data.valid is None)
    predicted = {c: c.predicted_us if applies else None for c in (*drawn, chosen)}
    takes = predicted[chosen] or (real.end if real is not None else None)
    if takes is not None:
        scale = takes / own.end if own.end else 1.0
        runs = [_scaled(run, predicted[c], scale, own.name) for run, c in zip(runs, drawn, strict=True)]
    runs = runs if real is None else [real, *runs]
    count = workers or WORKERS[tables_of(arch)]
    beside = "" if recorded is None else "; the first run was recorded on a GPU"
    subtitle = f"Simulated for {arch} with {count} workers{beside}. Chosen: {chosen.kernel} {chosen.schedule}"
    if site.mask.operands and data is None:
        subtitle += ". Drawn as if the mask's tensors hid nothing"
    return Picture(f"Backward of {in_words(site)}", subtitle, tuple(runs))


def _run(
    site: Site, arch: str, candidacy: Candidacy, chosen: Candidacy, data: Lengths | None, gpu: str, workers: int | None
) -> Timeline:
    """The simulated run of a candidate; its name includes the kernel family if that is not the chosen one."""
    assert candidacy.plan is not None
    run = of_plan(site, arch, candidacy.plan, data=data, gpu=gpu, workers=workers)
    name = run.name if candidacy.kernel == chosen.kernel else f"{run.name}, {candidacy.kernel}"
    return replace(run, name=name, badge="chosen" if candidacy.chosen else "")


def _scaled(run: Timeline, predicted: float | None, scale: float, chosen: str) -> Timeline:
    """The run in microseconds, scaled to its predicted time, or with the chosen run's scale, which a note then says."""
    if predicted is not None and run.end:
        return run.in_unit(MICROSECONDS, predicted / run.end)
    notes = (run.note, "" if run.badge else f"not calibrated, drawn to the scale of {chosen}")
    return replace(run.in_unit(MICROSECONDS, scale), note="; ".join(filter(None, notes)))


def row(candidacy: Candidacy) -> tuple[str, ...]:
    """Returns a candidate's cells in the table with the columns `HEAD`; a star marks the chosen candidate."""
    c = candidacy
    tiles = " + ".join(f"{t.block_q}x{t.block_kv}" for t in (c.dkdv, c.dq) if t is not None)
    predicted = "" if c.plan is None else "unknown" if c.predicted_us is None else f"{c.predicted_us:,.0f} µs"
    return "*" if c.chosen else "", c.schedule or "", c.kernel, tiles, predicted, c.why


def in_words(site: Site) -> str:
    """Describes a site's shape and mask, for example "2 x 16 heads of 4096 tokens, head dim 128, causal, bfloat16"."""
    heads = f"{site.batch} x {site.q_heads} heads" + (f" on {site.kv_heads}" if site.group > 1 else "")
    lengths = f"{site.q_len} tokens" if site.q_len == site.kv_len else f"{site.q_len} queries and {site.kv_len} keys"
    dims = f"head dim {site.head_dim}" + (f", of value {site.value_dim}" if site.value_dim != site.head_dim else "")
    words = {"keys": "valid keys", "segments": "documents", "interval": "intervals", "dense": "a dense mask"}
    words |= {"head_interval": "intervals by head"}
    names = [name for name in dict.fromkeys([*words, *COMPONENTS]) if site.mask.components.get(name) is not None]
    facts = [
        f"{heads} of {lengths}",
        dims,
        str(site.band),
        *(words.get(name, name) for name in names),
        *(["a bias"] if site.spec.bias is not None else []),
    ]
    facts += [f"dropout {site.dropout.p:g}"] if site.dropout is not None else []
    return ", ".join([*facts, site.dtype])
