"""The shapes of the forward benchmark, what it divides by, and what it compiles."""

from __future__ import annotations

import pytest

from benchmarks import forward, turns
from benchmarks.shapes import CAUSAL, FULL, Shape, regular
from dash_inductor.kernels.hopper.forward import build
from dash_inductor.model import Band


@pytest.mark.parametrize(("mask", "share"), [(FULL, 1.0), (CAUSAL, 0.5)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_regular_shapes_count_as_usual(head_dim: int, mask: Band, share: float) -> None:
    heads = 2048 // head_dim
    assert turns.flops(regular(head_dim, mask, 4096)) == pytest.approx(share * 4 * 4 * heads * 4096**2 * head_dim)


@pytest.mark.parametrize("mask", [FULL, Band(0, 99), Band(0, 255)], ids=str)
def test_two_matmuls_over_the_visible_pairs(mask: Band) -> None:
    shape = Shape("test", 2, 3, 1, 300, 192, 128, mask)
    pairs = sum(mask.visible(i, j, 300, 300) for i in range(300) for j in range(300))
    assert turns.flops(shape) == pytest.approx(2 * 3 * pairs * 2 * (192 + 128))


@pytest.mark.parametrize("lengths", [forward.LENGTHS, forward.QUICK_LENGTHS])
def test_shapes_have_names_and_builds(lengths: tuple[int, ...]) -> None:
    shapes = forward.shapes(lengths)
    assert len({shape.name for shape in shapes}) == len(shapes)
    dims = {build.tile_dims(shape.head_dim, shape.value_dim) for shape in shapes}
    assert dims == set(build.FORWARD_CONFIGS)
    for shape in shapes:
        assert forward.problem_of(shape).even_kv is (shape.length != 8191)
