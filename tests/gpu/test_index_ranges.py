"""Sums by positions on a GPU: values and bits under load, for resampling and adaptive pooling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor.records.records import all_records, clear_sites

from ..support.index_sums import Program, results, worst
from ..support.repeats import differing_runs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

SHAPES = {1: (4, 16, 301), 2: (4, 16, 32, 31), 3: (2, 4, 8, 9, 10)}
RESAMPLED: list[dict[str, Any]] = [
    {"scale_factor": 2.0, "mode": "bilinear"},
    {"scale_factor": 3.0, "mode": "bilinear"},
    {"size": (100, 77), "mode": "bilinear", "align_corners": True},
    {"size": (16, 9), "mode": "bilinear"},
    {"size": (100, 77), "mode": "nearest"},
    {"scale_factor": 32.0, "mode": "nearest-exact"},
    {"scale_factor": 2.0, "mode": "bicubic"},
    {"scale_factor": 2.5, "mode": "linear"},
    {"scale_factor": 2.0, "mode": "trilinear"},
]
DIMS = {"linear": 1, "trilinear": 3}


def checked(program: Program, x: Tensor, tolerance: float) -> None:
    """Values as in double precision on this device, by one rewrite, and the same bits each time."""
    torch.use_deterministic_algorithms(False)
    exact = results(program, x.double(), x)
    torch.use_deterministic_algorithms(True)
    torch._dynamo.reset()
    clear_sites()
    compiled = torch.compile(program, dynamic=False)
    assert worst(results(compiled, x, x), exact) < tolerance
    assert [(record.rewrite, record.status) for record in all_records()] == [("index_ranges", "replaced")]
    assert differing_runs(lambda: results(compiled, x, x), 50, load=True, poisoned=True) == 0


@pytest.mark.parametrize("options", RESAMPLED, ids=str)
def test_resampling(options: dict[str, Any]) -> None:
    x = torch.randn(SHAPES[DIMS.get(options["mode"], 2)], device="cuda")
    checked(lambda x, _: F.interpolate(x, **options), x, 1e-5)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_channels_last_in_16_bits(mode: str) -> None:
    x = torch.randn(4, 64, 32, 30, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    checked(lambda x, _: F.interpolate(x.sin(), scale_factor=2.0, mode=mode), x, 1e-2)


def segmentation(scale: int) -> tuple[Program, Tensor]:
    """The loss of logits of each pixel, which are upsampled, and the maps that they are made of."""
    torch.manual_seed(0)
    weight = torch.randn(48, 64, device="cuda") / 8
    labels = torch.randint(0, 48, (4, 32 * scale, 32 * scale), device="cuda")

    def loss(x: Tensor, _: Tensor) -> Tensor:
        logits = F.linear(x.relu(), weight.to(x.dtype)).permute(0, 3, 1, 2)
        upsampled = F.interpolate(logits, scale_factor=float(scale), mode="bilinear")
        return F.cross_entropy(upsampled, labels, reduction="none")

    return loss, torch.randn(4, 32, 32, 64, device="cuda")


@pytest.mark.parametrize("scale", [2, 4, 16])
def test_upsampled_logits(scale: int) -> None:
    """The gradient of logits is computed where it is summed: at once, in additions and in reductions."""
    program, x = segmentation(scale)
    checked(program, x, 1e-4)


@pytest.mark.parametrize("scale", [2, 4])
def test_memory_of_upsampled_logits(scale: int) -> None:
    """No more than PyTorch takes by default."""
    program, x = segmentation(scale)
    peaks = []
    for is_deterministic in (False, True):
        torch.use_deterministic_algorithms(is_deterministic)
        torch._dynamo.reset()
        compiled = torch.compile(program, dynamic=False)
        leaf = x.bfloat16().requires_grad_()
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            compiled(leaf, x).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] <= 1.01 * peaks[0]


@pytest.mark.parametrize("count", [(8, 8), (7, 5), (40, 3)], ids=str)
def test_adaptive_pooling(count: tuple[int, int]) -> None:
    """For which PyTorch has no deterministic kernel."""
    checked(lambda x, _: F.adaptive_avg_pool2d(x, count), torch.randn(4, 64, 32, 31, device="cuda"), 1e-5)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(20, 13), (45, 60)], ids=str)
def test_antialiased(mode: str, size: tuple[int, int]) -> None:
    """For which PyTorch has no deterministic kernel."""
    x = torch.randn(4, 16, 64, 31, device="cuda")
    checked(lambda x, _: F.interpolate(x, size=size, mode=mode, antialias=True), x, 1e-5)


def test_antialiased_with_channels_last() -> None:
    x = torch.randn(4, 16, 64, 31, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    checked(lambda x, _: F.interpolate(x.sin(), size=(20, 40), mode="bilinear", antialias=True), x, 2e-2)
