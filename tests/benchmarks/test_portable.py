"""The shapes, kernels and options of the benchmark of the portable forward, and what it divides by."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from benchmarks import forward, portable, turns
from benchmarks.shapes import FULL
from dash_inductor.errors import ArgumentError
from dash_inductor.kernels.hopper.forward import build
from dash_inductor.model import Tiles

USED = portable.parse_tiles([f"{group}={tiles}" for group in portable.TILES for tiles in portable.TILES[group]])


@pytest.mark.parametrize("module", [forward, portable])
def test_list(module: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no GPU, and `--only` with a word that no name has is an error that says so."""

    def run(*options: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", [module.__name__, *options])
        module.main()
        return capsys.readouterr().out.splitlines()

    shapes = portable.shapes() if module is portable else forward.shapes(forward.LENGTHS)
    assert run("--list") == [shape.name for shape in shapes]
    with pytest.raises(SystemExit, match=re.escape("no shape has one of ['no such shape'] in its name")):
        run("--list", "--only", "no such shape")


def test_names_tell_the_shapes_apart() -> None:
    shapes = portable.shapes()
    assert len({shape.name for shape in shapes}) == len(shapes)


def test_columns() -> None:
    """Every shape has a kernel of ours and one of PyTorch's; other tiles are tried at one length."""
    for shape in portable.shapes():
        columns = list(portable.contenders(shape, "sm_90", USED))
        assert columns[0] == ("hopper" if shape.group in ("narrow", "short", "decode") else "portable")
        assert columns[-1] == ("cudnn" if shape.bits == 16 else "efficient")
        tried = len(portable.tiles_of(shape, "sm_90", USED)) - 1
        assert (tried >= 2) == (shape.group in USED and shape.length == portable.TRIED_AT)
        assert "portable" in portable.contenders(shape, "sm_80", {})
        if shape.bits == 16:
            assert build.tile_dims(shape.head_dim, shape.value_dim) in build.FORWARD_CONFIGS


def test_queries_count_alone() -> None:
    shape = portable.shape_of("test", 64, FULL, 4096, queries=3)
    assert turns.flops(shape) == 4 * 16 * 3 * 4096 * 4 * 64
    site = shape.site()
    assert (site.q_len, site.kv_len) == (3, 4096)


def test_kernels_have_the_strides_of_the_tensors() -> None:
    """A part of the queries lies in a longer tensor; out is as long as it is."""
    shape = portable.shape_of("test", 32, FULL, 4096, queries=16, dtype="float32")
    kernel = portable.rendered(shape, Tiles(32, 32, 8, 1))
    lines = [line.strip() for line in kernel.text.splitlines()]
    assert f"query = Operand(Q, ({4096 * 1024}, 32, 1024, 1,))" in lines
    assert any(line.startswith(f"tl.store(OUT + idx_b * {16 * 1024} + idx_h * 32 + ") for line in lines)
    assert kernel.types == ("*fp32",) * 5
    assert kernel.grid == 4 * 32


def test_other_tiles() -> None:
    assert portable.parse_tiles(["fp32=64x32w8s1", "fp32=32x32w4s1"]) == {
        "fp32": [Tiles(64, 32, 8, 1), Tiles(32, 32, 4, 1)]
    }
    for word in ("64x32w8s1", "fp8=64x32w8s1", "fp32=64x32"):
        with pytest.raises(ArgumentError, match="tiles="):
            portable.parse_tiles([word])


def test_what_does_not_fit_is_named() -> None:
    shape = portable.shape_of("test", 64, FULL, 1024)
    assert portable._failure((shape, Tiles(64, 64, 4, 2), "sm_90")) == ""
    assert "bytes of shared memory" in portable._failure((shape, Tiles(128, 128, 8, 8), "sm_90"))
