"""Tiles of portable kernels beside a bias of a head dim of 256: errors of every result, and times; in warnings."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from dash_inductor import lowering
from dash_inductor.model import Band, Plan, Tiles

from ..support.paired import PairedAttention
from ..support.together import side_by_side
from .test_wide_bias import BF16, FP16, NAMES, compiled, planned

pytestmark = pytest.mark.gpu

VARIANTS = {
    "planned": (None, None),
    "one stage": ("32x32w8s1", "32x32w8s1"),
    "four warps": ("32x32w4s2", "32x32w4s2"),
    "wide dq": ("32x32w8s2", "32x64w8s2"),
    "warpgroups": ("64x64w8s1", "64x32w4s1"),
    "both kinds": ("32x64w8s2", "64x32w8s2"),
}


@pytest.fixture(scope="module", autouse=True)
def compiled_side_by_side() -> Iterator[None]:
    lowering.register()
    with side_by_side():
        yield


def milliseconds(call: Any) -> float:
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 200


@pytest.mark.parametrize("variant", VARIANTS)
def test_tiles(variant: str) -> None:
    small = PairedAttention.random(
        130, 190, Band(), dim=192, dtype=FP16, scale=192**-0.5, device="cuda", bias="bqk:infinite", keys=True
    )
    large = PairedAttention.random(
        2048, 2048, Band(), dim=256, dtype=BF16, batch=4, group=16, scale=1 / 16, device="cuda", bias="hqk:random"
    )
    dkdv, dq = VARIANTS[variant]

    def plan(p: PairedAttention) -> Plan:
        found = planned(p, "two_pass")
        return found if dkdv is None or dq is None else replace(found, dkdv=Tiles.parse(dkdv), dq=Tiles.parse(dq))

    try:
        (results,) = compiled([small], [plan(small)])()
        out, gradients, _ = small.exact()
        found = [*results[:4], small.reduced(results[4])]
        errors = {
            n: f"{float((a.double() - b).norm() / b.norm()):.1e}"
            for n, a, b in zip(NAMES, found, (out, *gradients), strict=True)
        }
        took = milliseconds(compiled([large], [plan(large)]))
        warnings.warn(f"{variant} {plan(large)}: {errors}; 4 x 16 x 2048, D=256: {took:.2f} ms", stacklevel=1)
    except Exception as error:
        warnings.warn(f"{variant}: {type(error).__name__} {str(error)[:300]}", stacklevel=1)
