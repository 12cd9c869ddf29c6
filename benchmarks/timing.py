"""Timing of several calls in alternation: medians and quartiles."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.cuda import _sleep as sleep

Call = Callable[[], object]
K = TypeVar("K")


@dataclass(frozen=True)
class Timing:
    """Times of several calls in milliseconds: their median, and the quartiles below and above it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, times: list[float]) -> Timing:
        """The timing of these calls, at least one."""
        if len(times) == 1:
            return cls(times[0], times[0], times[0])
        low, median, high = statistics.quantiles(times, n=4, method="inclusive")
        return cls(median, low, high)


def take_turns(
    calls: Mapping[K, Call],
    device: str,
    *,
    repeats: int = 20,
    warmup: int = 3,
    report: Callable[[], object] = lambda: None,
) -> dict[K, Timing]:
    """Returns the timing of each call.

    The calls alternate, because a GPU at its power limit changes its clocks by several percent within seconds, which
    then affects all calls alike.

    Args:
        device: "cuda" or "cpu", where the calls run.
        repeats: timed calls of each.
        warmup: untimed calls of each before that.
        report: called after every round.
    """
    clock = _GpuClock() if device == "cuda" else _time_on_cpu
    for call in calls.values():
        for _ in range(warmup):
            call()
    times: dict[K, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(clock(call))
        report()
    return {name: Timing.of(spent) for name, spent in times.items()}


def _time_on_cpu(call: Call) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


class _GpuClock:
    """Times one call on the GPU; the L2 cache is cleared before it.

    The GPU sleeps for a few milliseconds first, so that the host, which takes 0.1 ms for a compiled call and more where
    other processes keep its cores busy, has queued all of it when the clock starts.
    """

    def __init__(self) -> None:
        self._larger_than_l2 = torch.empty(64 << 20, dtype=torch.int32, device="cuda")

    def __call__(self, call: Call) -> float:
        sleep(8_000_000)
        self._larger_than_l2.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))
