"""The operations that the backward benchmark divides by."""

from __future__ import annotations

import pytest

from benchmarks.shapes import ALSO, CAUSAL, FULL, REGULAR, SHAPES, TILE, Shape, regular
from dash_inductor.model import Band


@pytest.mark.parametrize("mask", [FULL, CAUSAL, Band(0, 255), Band(0, 299)], ids=str)
@pytest.mark.parametrize("length", [256, 1000])
def test_visible_pairs_and_tiles(mask: Band, length: int) -> None:
    shape = Shape("test", 2, 3, 1, length, 64, 32, mask)
    visible = {(i, j) for i in range(length) for j in range(length) if mask.visible(i, j, length, length)}
    tiles = {(i // TILE, j // TILE) for i, j in visible}
    per_pair = 2 * (3 * 64 + 2 * 32)
    pairs = length**2 / 2 if mask == CAUSAL else len(visible)
    assert shape.flops == 2 * 3 * pairs * per_pair
    assert shape.tile_flops == 2 * 3 * len(tiles) * TILE**2 * per_pair


def test_regular_table_counts_as_usual() -> None:
    shape = regular(128, CAUSAL, 4096)
    assert shape.flops == 2.5 * 4 * 4 * 16 * 4096**2 * 128 / 2


def test_names_are_unique_and_references_exist() -> None:
    assert len(SHAPES) == len(REGULAR) + len(ALSO)
    assert {shape.regular for shape in ALSO} <= {shape.name for shape in REGULAR}
