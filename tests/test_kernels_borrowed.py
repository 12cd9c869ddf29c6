"""How borrowed forwards are called: FlashAttention-2's arguments and layouts, against a stand-in for the library."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from dash_inductor.kernels import borrowed, reference_forward

from dash_inductor.errors import ArgumentError
from dash_inductor.model import Band, Tiles
from tests.support.borrowed import Library
from tests.support.calls import forward_call

BOTTOM = [Band(lo, hi, "bottom_right") for lo, hi in ((None, None), (0, None), (0, 4), (-3, 2), (-2, None))]


def exactly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Band) -> tuple[torch.Tensor, torch.Tensor]:
    return reference_forward.forward(q, k, v, [], forward_call(band, 0.3), Tiles(64, 64, 1, 1))


@pytest.mark.parametrize("mask", BOTTOM, ids=str)
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 9), (5, 9), (9, 9)])
def test_flash_gives_what_the_reference_gives(
    mask: Band, q_len: int, kv_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library()
    monkeypatch.setattr(borrowed, "aten", library)
    for batch, group, layout in product((1, 3), (1, 4), ("interleaved", "contiguous", "strided columns")):

        def tensor(heads: int, length: int, batch: int = batch, layout: str = layout) -> torch.Tensor:
            if layout == "interleaved":
                return torch.randn(batch, length, heads, 8).transpose(1, 2)
            return (
                torch.randn(batch, heads, length, 16)[..., ::2]
                if layout != "contiguous"
                else torch.randn(batch, heads, length, 8)
            )

        q, k, v = tensor(2 * group, q_len), tensor(2, kv_len), tensor(2, kv_len)
        band = mask.resolve(q_len, kv_len)
        out, lse = borrowed._flash(q, k, v, band, 0.3)
        exact, exact_lse = exactly(q, k, v, band=band)
        assert out.shape == q.shape
        torch.testing.assert_close(out, exact)
        torch.testing.assert_close(lse, exact_lse)
        assert library.arguments["max_k"] == kv_len


@pytest.mark.parametrize(
    ("mask", "q_len", "kv_len"),
    [(Band(0, None), 3, 9), (Band(-50, 37, "bottom_right"), 799, 40), (Band(None, 2), 9, 3)],
)
def test_flash_refuses_what_it_would_compute_wrongly(mask: Band, q_len: int, kv_len: int) -> None:
    q, k = torch.randn(1, 1, q_len, 8), torch.randn(1, 1, kv_len, 8)
    with pytest.raises(ArgumentError, match="mask="):
        borrowed._flash(q, k, k, mask.resolve(q_len, kv_len), 1.0)


@pytest.mark.parametrize("mask", [Band(0, None), Band(0, 3), Band(-40, -35), Band(None, -3)], ids=str)
def test_the_reference_reads_no_value_that_nobody_sees(mask: Band) -> None:
    q, k, v = (torch.randn(1, 2, n, 8) for n in (20, 50, 50))
    keep = torch.tensor([[mask.visible(i, j, 20, 50) for j in range(50)] for i in range(20)])
    poisoned = [
        torch.where(seen[:, None], t, float("nan"))
        for t, seen in ((q, keep.any(1)), (k, keep.any(0)), (v, keep.any(0)))
    ]
    band = mask.resolve(20, 50)
    for clean, found in zip(exactly(q, k, v, band=band), exactly(*poisoned, band=band), strict=True):
        assert torch.equal(clean, found)
