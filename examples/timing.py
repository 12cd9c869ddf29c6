"""Time of a training step on a GPU: PyTorch's default, deterministic PyTorch, and deterministic with dash_inductor."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

import dash_inductor

from .training import Settings, batch_of, build_model, make_step

MODES = ("default, not deterministic", "deterministic, without dash_inductor", "deterministic, with dash_inductor")


def step_ms(settings: Settings, tokens: Tensor, mode: str, warmup: int = 3, repeats: int = 10) -> float:
    """Median time in ms of one step (forward, backward, optimiser) in one of `MODES`, compiled anew."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode != MODES[0])
    torch._dynamo.reset()
    try:
        with nullcontext() if mode == MODES[2] else dash_inductor.disabled():
            step = make_step(settings, build_model(settings))
            batch = batch_of(tokens, settings, 0)
            for _ in range(warmup):
                step(batch)
            return statistics.median(_timed(step, batch) for _ in range(repeats))
    finally:
        torch.use_deterministic_algorithms(before)


def _timed(step: Callable[[Tensor], Tensor], batch: Tensor) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step(batch)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
