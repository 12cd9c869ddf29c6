"""Calibrated times of the Hopper kernels, in microseconds: measured, and fitted by `tools/predictions.py`.

Only `prediction` in this folder uses them.  No plan depends on them, and nothing is measured at run time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .kernel_configs import Dims


@dataclass(frozen=True)
class Backward:
    """Times of the main kernel of the backward, in microseconds.

    Args:
        step: time of one tile pair, a q tile and a kv tile.
        masked: additional time of a tile pair that needs an elementwise mask.
        tile_schedule: fixed time of a tile schedule: loading k and v, storing dk and dv, taking the next work id.
        group: additional fixed time where query heads share a kv head, so that dk and dv are summed over them.
        down: additional fixed time of a tile schedule that begins at the last q tile, at which other tile schedules of
            its head begin, too.
    """

    step: float
    masked: float
    tile_schedule: float
    group: float
    down: float


@dataclass(frozen=True)
class Forward:
    """Times of the forward kernel, in microseconds.

    Args:
        step: time of one kv tile of a q tile.
        masked: additional time of a kv tile that needs an elementwise mask.
        tile: fixed time of a q tile.
        launch: fixed time of a call.
    """

    step: float
    masked: float
    tile: float
    launch: float


@dataclass(frozen=True)
class Calibration:
    """The measured times of the kernels on one GPU model, in microseconds.

    Args:
        before: time of `prepare`, the kernel before the main kernel of the backward, for 2**25 elements of q; it is
            bound by memory bandwidth.
        after: time of `finish`, the kernel after the main kernel, for 2**25 elements of q; it begins on SMs that have
            run out of work.
        launch: fixed time of a backward, for all that the other numbers do not cover.
        backward: times of the main kernel by the head dims of a tile; head dims that were not measured are missing.
        forward: times by (head dim of q and k, head dim of v, whether the mask is a sliding window); under a window
            neighbouring q tiles share keys.
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
"""Time of a backward at head dims of 128 with key validity, a dense mask or dropout, relative to a band with the same
tile pairs.  Computed from the rows of benchmarks/results/masks.json that were measured together with such a band, at
the commit that the file names.
"""
