"""Head dims that are no multiples of 8, compiled without a GPU: budgets, and sums whose order no stride decides."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dash_inductor.kernels.portable import standalone
from dash_inductor.kernels.portable.family import LIMIT, LIMIT_OF_16_BITS
from dash_inductor.model import AttentionSpec, Band, Mask, Site
from dash_inductor.model.architectures import SHARED_BYTES
from dash_inductor.planning import plan

from ...support.portable_builds import built, stages
from ...support.portable_plans import portable_plan

LENGTH = 333
OF_QUERIES_AND_KEYS, OF_VALUES = ("Q", "K", "DQ_OUT", "DK_OUT"), ("V", "DO", "OUT", "DV")


def cases(count: int) -> list[tuple[str, str, tuple[int, int], str, int]]:
    """Random (architecture, dtype, head dims, schedule, query heads of a kv head); no dim is a multiple of 8."""
    draw = random.Random(0)
    found = []
    for number in range(count):
        dtype = ("bfloat16", "float32", "float16")[number % 3]
        limit = LIMIT if dtype == "float32" else LIMIT_OF_16_BITS
        dims = [dim for dim in range(1, limit + 1) if dim % 8]
        equal = draw.choice(dims)
        pair = (equal, equal) if number % 2 else (draw.choice(dims), draw.choice(dims))
        arch = draw.choice([*SHARED_BYTES]) if number % 4 == 3 else "sm_90"
        found.append((arch, dtype, pair, draw.choice(["two_pass", "spt"]), draw.choice([1, 4])))
    return found


def site_of(dtype: str, dims: tuple[int, int], group: int) -> Site:
    spec = AttentionSpec(Mask(Band(0)), 0.2)
    return Site("cuda", dtype, 2, 4, 4 // group, LENGTH, LENGTH, *dims, spec)  # type: ignore[arg-type]  # a dtype


def kernels(site: Site, arch: str, schedule: str, strides: dict[str, Sequence[int]]) -> list[standalone.Rendered]:
    found = portable_plan(site, arch, schedule)
    return [*standalone.render(found, site, strides), standalone.render_forward(found, site, strides)]


def head_major(heads: int, dim: int) -> Sequence[int]:
    return heads * LENGTH * dim, LENGTH * dim, dim, 1


def token_major(heads: int, dim: int) -> Sequence[int]:
    return LENGTH * heads * dim, dim, heads * dim, 1


def among_others(heads: int, dim: int) -> Sequence[int]:
    """As a slice of query, key and value that are the columns of one matrix."""
    return LENGTH * 3 * heads * dim, dim, 3 * heads * dim, 1


def aligned(heads: int, dim: int) -> Sequence[int]:
    """Rows with room behind them."""
    row = -(-dim // 16) * 16
    return heads * LENGTH * row, LENGTH * row, row, 1


def by_column(heads: int, dim: int) -> Sequence[int]:
    return heads * LENGTH * dim, LENGTH * dim, 1, LENGTH


LAYOUTS = (token_major, among_others, aligned, by_column)


def strides_of(site: Site, layout: object) -> dict[str, Sequence[int]]:
    assert callable(layout)
    heads = {"Q": site.q_heads, "DQ_OUT": site.q_heads, "DO": site.q_heads, "OUT": site.q_heads}
    dims = dict.fromkeys(OF_QUERIES_AND_KEYS, site.head_dim) | dict.fromkeys(OF_VALUES, site.value_dim)
    return {name: layout(heads.get(name, site.kv_heads), dim) for name, dim in dims.items()}


def order_of_sums(kernel: standalone.Rendered, arch: str) -> tuple[set[str], set[str], set[str]]:
    """What decides the order of sums: layouts of sums of more than two numbers, and of matmuls and their operands."""
    ttgir = stages(kernel, arch, "ttgir")["ttgir"]
    names = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    for _ in range(2):  # a layout may name another one
        ttgir = re.sub(r"#\w+\b", lambda match: names.get(match[0], match[0]), ttgir)
    reductions = re.findall(
        r'"tt\.reduce".*?axis = (\d).*?(arith\.\w+) .*?\}\) : \(tensor<([\dx]+)xf32, (.*?)>\) ->', ttgir, re.DOTALL
    )
    long = {
        f"{shape} {layout}"
        for axis, kind, shape, layout in reductions
        if kind == "arith.addf" and shape.split("x")[int(axis)] != "2"
    }
    matmuls = set(re.findall(r"(?:tt\.dot|ttng\.warp_group_dot) .* -> (tensor<.*>)", ttgir))
    return long, matmuls, set(re.findall(r"kWidth = \d+", ttgir))


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=str(c), marks=pytest.mark.full if i % 6 else []) for i, c in enumerate(cases(24))]
)
def test_strides_do_not_decide_the_order_of_sums(case: tuple[str, str, tuple[int, int], str, int]) -> None:
    """Note [Rows of any alignment]: strides decide what a thread loads at once, and no sum may follow that."""
    arch, dtype, dims, schedule, group = case
    site = site_of(dtype, dims, group)
    expected = [order_of_sums(kernel, arch) for kernel in kernels(site, arch, schedule, strides_of(site, head_major))]
    assert any(matmuls for _, matmuls, _ in expected)
    for layout in LAYOUTS:
        found = [order_of_sums(kernel, arch) for kernel in kernels(site, arch, schedule, strides_of(site, layout))]
        assert found == expected, layout.__name__


def test_strides_would_decide_it() -> None:
    """The control of the test above: with the sum of rows that begin at multiples of 16 bytes, they would."""
    site = site_of("bfloat16", (20, 20), 1)
    found = set()
    for layout in (token_major, aligned):
        kernel = kernels(site, "sm_90", "spt", strides_of(site, layout))[0]
        text, count = re.subn(r"TILE\.VALUE_DIM % 8 == 0", "True", kernel.text)
        assert count == 1
        found.add(str(order_of_sums(replace(kernel, text=text), "sm_90")))
    assert len(found) == 2


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=str(c), marks=pytest.mark.full if i % 8 else []) for i, c in enumerate(cases(24))]
)
def test_fits_the_architecture(case: tuple[str, str, tuple[int, int], str, int]) -> None:
    """Shared memory fits, and a thread spills at most 2 KB.

    Odd dims in 16 bits are not loaded ahead, and their addresses take registers; tiles of float32 fill all of them.
    """
    arch, dtype, dims, schedule, group = case
    site = site_of(dtype, dims, group)
    for kernel in kernels(site, arch, schedule, {}):
        _, used = built(kernel, arch)
        assert used.shared_memory <= SHARED_BYTES[arch], (kernel.tiles, used)
        assert max(used.spill_stores, used.spill_loads) <= 2048, (kernel.tiles, used)


@pytest.mark.parametrize("dims", [(4, 4), (20, 20), (33, 64), (64, 33), (100, 20), (255, 255)])
def test_hopper_kernels_leave_them_to_the_portable_ones(dims: tuple[int, int]) -> None:
    """TMA reads rows that begin at multiples of 16 bytes."""
    found = plan(site_of("bfloat16", dims, 1), "sm_90")
    assert (found.kernel, found.forward) == ("portable", "portable")
