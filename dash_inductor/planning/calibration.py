"""What steps and CTAs of the Hopper kernels take, in microseconds: measured, and fitted by ``tools/predictions.py``.

They serve `prediction` alone.  No choice depends on them, and none is taken at run time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Dims = tuple[int, int]
"""Head dims of a tile, of q and k, and of v: a key of `costs.HOPPER`."""


@dataclass(frozen=True)
class Backward:
    """Times of the main kernel of the backward, in microseconds.

    Args:
        step: one tile pair.
        masked: what a tile pair takes longer that the mask cuts.
        cta: what every CTA takes beside its steps: loading, storing dk and dv, taking the next ticket.
        group: what a CTA takes longer where query heads share a kv head, and dk and dv are sums over them.
        down: what a CTA takes longer that begins at the last q tile, where the others of its head begin too.
        bent: a step of `bent_fold` relative to one of the other schedules; its expressions are longer.
    """

    step: float
    masked: float
    cta: float
    group: float
    down: float
    bent: float


@dataclass(frozen=True)
class Forward:
    """Times of the forward, in microseconds.

    Args:
        step: one kv tile of a tile of queries.
        masked: what a kv tile takes longer that the mask cuts.
        tile: what a tile of queries takes beside its steps.
        launch: what a call takes beside its tiles.
    """

    step: float
    masked: float
    tile: float
    launch: float


@dataclass(frozen=True)
class Calibration:
    """What was measured on one kind of GPU.

    Args:
        around: time of the kernels around the main kernel of the backward, for 2**25 elements of q; memory decides it.
        launch: what a backward takes beside that.
        backward, forward: by the head dims of a tile; what has not been measured is missing.
    """

    around: float
    launch: float
    backward: Mapping[Dims, Backward]
    forward: Mapping[Dims, Forward]


CALIBRATIONS: dict[str, Calibration] = {
    "H100": Calibration(85.0, 10.0, {
        (64, 64): Backward(2.38, 0.75, 4.0, 0.0, 2.2, 1.05),
        (128, 128): Backward(2.17, 0.34, 8.0, 4.9, 3.8, 1.037),
    }, {}),
    "H200": Calibration(59.0, 10.0, {
        (64, 64): Backward(2.45, 0.0, 5.0, 0.0, 2.2, 1.05),
        (128, 128): Backward(2.16, 1.04, 5.0, 11.5, 3.8, 1.037),
    }, {
        (64, 64): Forward(1.424, 0.575, 1.674, 0.0),
        (128, 128): Forward(1.476, 1.081, 0.477, 22.7),
        (192, 128): Forward(1.768, 3.685, 1.87, 0.0),
        (256, 256): Forward(1.394, 1.83, 0.0, 18.4),
    }),
}  # fmt: skip

ALONE = {"fold": 1.07, "spt": 1.0, "descending": 0.9}
"""Time of a causal backward relative to the model's, where all CTAs run at once.  It does not know why they differ."""
