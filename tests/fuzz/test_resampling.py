"""Resampling and pooling of random sizes, scales and modes, beside PyTorch's."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..support.fuzzed import Case, cases, check

SIZES = (1, 2, 3, 5, 6, 9, 12)


def resampled(r: random.Random) -> Case:
    dims = r.choice([1, 2, 2, 3])
    mode = r.choice({
        1: ["nearest", "nearest-exact", "linear"],
        2: ["nearest", "nearest-exact", "bilinear", "bicubic"],
        3: ["nearest", "nearest-exact", "trilinear"],
    }[dims])  # fmt: skip
    options: dict[str, Any] = {"mode": mode}
    if "linear" in mode or mode == "bicubic":
        options["align_corners"] = r.random() < 0.4
    if mode in ("bilinear", "bicubic") and r.random() < 0.5:
        options["antialias"] = True
    size = [r.choice(SIZES) for _ in range(dims)]
    if r.random() < 0.5:
        options["size"] = [r.choice([*SIZES, 20, 33]) for _ in range(dims)]
    else:
        factors = [f for f in (0.34, 0.5, 0.7, 1.0, 1.5, 2.0, 2.3, 4.0) if all(int(n * f) for n in size)]
        options["scale_factor"] = r.choice(factors)
        if r.random() < 0.3:
            options["recompute_scale_factor"] = True
    dtype = r.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
    x = torch.randn(r.choice([1, 2]), r.choice([1, 3]), *size).to(dtype)
    if dims == 2 and r.random() < 0.3:
        x = x.contiguous(memory_format=torch.channels_last)
    return Case(f"interpolate {size} {options} {dtype}", lambda x: F.interpolate(x, **options), [x.requires_grad_()])


def pooled(r: random.Random) -> Case:
    kind = r.choice(["max3", "adaptive max2", "adaptive max3", "fractional2", "fractional3", "average2", "average3"])
    dims = int(kind[-1])
    size = [r.choice([4, 5, 7, 9]) for _ in range(dims)]
    out = [r.choice([1, 2, 3, 4]) for _ in range(dims)]
    x = torch.randn(r.choice([1, 2]), r.choice([1, 3]), *size)
    if r.random() < 0.3:  # equal elements, of which one is the largest
        x = x.round()
    if r.random() < 0.2:
        x.flatten()[:3] = torch.nan
    samples = torch.rand(*x.shape[:2], dims)
    kernel, stride, padding = r.choice([1, 2, 3]), r.choice([1, 2, 3]), r.choice([0, 0, 1])
    fractional = F.fractional_max_pool2d if dims == 2 else F.fractional_max_pool3d

    def program(x: Tensor, samples: Tensor) -> Tensor:
        found: Tensor
        if kind.startswith("max"):
            found = F.max_pool3d(x, kernel, stride, min(padding, kernel // 2))
        elif kind.startswith("adaptive"):
            found = (F.adaptive_max_pool2d if dims == 2 else F.adaptive_max_pool3d)(x, out)  # type: ignore[assignment]
        elif kind.startswith("fractional"):
            found = fractional(
                x, 2, output_size=[min(o, s - 2) for o, s in zip(out, size, strict=True)], _random_samples=samples
            )  # type: ignore[assignment]
        else:
            found = (F.adaptive_avg_pool2d if dims == 2 else F.adaptive_avg_pool3d)(x, out)
        return found

    return Case(f"{kind} {size} {out} {kernel} {stride} {padding}", program, [x.requires_grad_(), samples])


def test_resampling() -> None:
    check(resampled, "resampling", cases(20), least=0.3)


def test_pooling() -> None:
    check(pooled, "pooling", cases(15), least=0.3)
