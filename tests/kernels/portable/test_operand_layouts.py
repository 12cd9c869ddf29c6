"""A vector of valid keys or of ids does not change how matmuls go through k: then their sums have the same order."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from dash_inductor.kernels.portable import standalone
from dash_inductor.model import Band, Plan, Site

from ...support.keyed import KeyedAttention
from ...support.portable_builds import stages
from ...support.portable_plans import portable_plan

CAUSAL = Band(0)
KINDS = {"keys": {"valid": "holes"}, "segments": {"documents": "same"}}
CASES = [
    (arch, dtype, schedule)
    for arch in ("sm_80", "sm_90", "sm_120")
    for dtype in (torch.bfloat16, torch.float32)
    for schedule in ("two_pass", "spt")
    if (arch, dtype) != ("sm_90", torch.bfloat16)  # wgmma alone, which has one order
]


def rendered(plan: Plan, site: Site) -> list[standalone.Rendered]:
    kernels = standalone.render(plan, site)
    return [*kernels, standalone.render_forward(plan, site)]


def layouts(kernel: standalone.Rendered, arch: str) -> set[str]:
    """The layouts that decide the order of sums: of operands of matmuls along k and, for sums of rows, along a row."""
    ttgir = stages(kernel, arch, "ttgir")["ttgir"]
    found = set(re.findall(r"kWidth = \d+", ttgir))
    if '"tt.reduce"' in ttgir and "LSE" in kernel.names and "DELTA" not in kernel.names:
        found |= set(re.findall(r"#ttg\.nvidia_mma<{.*?}>", ttgir))
    return found


def site_of(
    dtype: torch.dtype, arch: str, schedule: str, dim: int = 64, band: Band = CAUSAL, **data: str
) -> tuple[Plan, Site]:
    p = KeyedAttention.random(300, 333, band, dims=(dim, dim), group=2, dtype=dtype, **data)  # type: ignore[arg-type]
    site = replace(p.site(), device="cuda")
    return portable_plan(site, arch, schedule), site


@pytest.mark.parametrize(
    ("arch", "dtype", "schedule"),
    [
        pytest.param(*c, id="-".join(map(str, c)), marks=[] if i in (0, 5, 9) else pytest.mark.full)
        for i, c in enumerate(CASES)
    ],
)
def test_layouts_are_those_of_no_data(arch: str, dtype: torch.dtype, schedule: str) -> None:
    plan, site = site_of(dtype, arch, schedule)
    plain = [layouts(kernel, arch) for kernel in rendered(plan, site)]
    assert any("kWidth" in found for kernel in plain for found in kernel)
    assert any("nvidia_mma" in found for found in plain[-1]), "the forward sums rows"
    for kind, data in KINDS.items():
        _, with_data = site_of(dtype, arch, schedule, **data)
        assert [layouts(kernel, arch) for kernel in rendered(plan, with_data)] == plain, kind


@pytest.mark.parametrize(
    ("dim", "band"), [(128, CAUSAL), pytest.param(32, Band(), marks=pytest.mark.full), (64, Band(-99, 99))], ids=str
)
def test_head_dims_and_masks(dim: int, band: Band) -> None:
    schedule = "spt" if band is CAUSAL else "ascending"
    plan, site = site_of(torch.float16, "sm_80", schedule, dim, band)
    plain = [layouts(kernel, "sm_80") for kernel in rendered(plan, site)]
    for kind, data in KINDS.items():
        _, with_data = site_of(torch.float16, "sm_80", schedule, dim, band, **data)
        assert [layouts(kernel, "sm_80") for kernel in rendered(plan, with_data)] == plain, kind


def test_a_vector_of_bytes_would_change_them() -> None:
    """The reason for Note [Data operands]; if this fails, Triton has another rule, and 32 bits may be needless."""
    plan, site = site_of(torch.bfloat16, "sm_80", "spt", valid="holes")
    kernel = next(k for k in rendered(plan, site) if "dkdv" in k.text)
    types = ("*i1" if name == "KEYS" else of for name, of in zip(kernel.names, kernel.types, strict=True))
    narrow = replace(kernel, types=tuple(types))
    assert layouts(narrow, "sm_80") != layouts(kernel, "sm_80")
