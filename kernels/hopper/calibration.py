"""The times of steps and walks of the Hopper kernels, in microseconds: measured, and fitted by `tools/predictions.py`.

Only `prediction` beside this file uses these times.  No choice depends on them, and none is taken at run time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .kernel_configs import Dims


@dataclass(frozen=True)
class Backward:
    """Times of the main kernel of the backward, in microseconds.

    Args:
        step: one tile pair.
        masked: what a tile pair takes longer that the mask cuts.
        walk: what every walk takes beside its steps: loading, storing dk and dv, taking the next ticket.
        group: what a walk takes longer where query heads share a kv head, and dk and dv are sums over them.
        down: what a walk takes longer that begins at the last q tile, where the others of its head begin too.
    """

    step: float
    masked: float
    walk: float
    group: float
    down: float


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
    """The measured times of one kind of GPU.

    Args:
        before: time of the kernel before the main kernel of the backward, for 2**25 elements of q; memory decides it.
        after: the same for what follows the main kernel, which begins on SMs that have no walks left.
        launch: the other time of a backward.
        backward: by the head dims of a tile; head dims that have not been measured are missing.
        forward: by the head dims of a tile, and whether the mask is a window, whose tiles share their keys with
            neighbours.
    """

    before: float
    after: float
    launch: float
    backward: Mapping[Dims, Backward]
    forward: Mapping[tuple[int, int, bool], Forward]


CALIBRATIONS: dict[str, Calibration] = {
    "H200": Calibration(35.0, 30.0, 14.0, {
        (64, 64): Backward(2.232, 0.352, 3.086, 0.0, 0.0),
        (128, 128): Backward(1.97, 0.0, 4.936, 3.6, 1.008),
        (192, 128): Backward(3.446, 0.0, 4.936, 3.6, 1.008),
    }, {
        (64, 64, False): Forward(1.365, 0.472, 0.0, 35.199),
        (64, 64, True): Forward(1.287, 0.0, 2.664, 27.6),
        (128, 128, False): Forward(1.451, 1.033, 0.584, 20.923),
        (128, 128, True): Forward(1.71, 0.0, 0.0, 24.78),
        (192, 128, False): Forward(1.704, 1.371, 1.52, 10.755),
        (256, 256, False): Forward(1.367, 1.988, 0.0, 11.778),
    }),
}  # fmt: skip

DATA = {"keys": 1.05, "dense": 1.08, "dropout": 1.27}
"""Time of a backward at head dims of 128 with valid keys, a dense mask or dropout, relative to the closed form of the
same tile pairs: from the rows of benchmarks/results/masks.json that ran beside one, at the commit that it names.
"""
