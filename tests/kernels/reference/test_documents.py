"""Packed documents in the reference executors: a document has the same bits wherever it lies, beside whatever.

Sequences end with a complete tile here.  A sum on a CPU depends on how long it is, which a GPU's tiles hide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dash_inductor.kernels.family import Candidate
from dash_inductor.kernels.hopper.kernel_configs import CANDIDATES as HOPPER
from dash_inductor.kernels.hopper.kernel_configs import FORWARD_CONFIGS
from dash_inductor.kernels.portable.family import CANDIDATES as PORTABLE
from dash_inductor.kernels.portable.family import FORWARD_TILES
from dash_inductor.kernels.reference import backward as reference
from dash_inductor.kernels.reference import forward as reference_forward
from dash_inductor.kernels.reference.family import TILES as REFERENCE
from dash_inductor.model import AttentionSpec, Band, Mask, Operand, Plan, Segments, Site
from dash_inductor.model.architectures import WORKERS
from dash_inductor.planning import plan

from ...support.documents import OTHERS, PLACES, TILE, among, of_document
from ...support.keyed import KeyedAttention, segment_ids

BANDS = [Band(0), Band(), Band(0, 99), Band(-30, 99)]
GRID = [("cpu", 64, 1), ("sm_80", 128, 1), ("sm_90", 64, 1), ("sm_90", 128, 3)]
"""Architectures with head dimensions and query heads of a group."""


def planned(p: KeyedAttention, arch: str, schedule: str | None = None) -> Plan:
    """The plan of a 16-bit problem; its tiles are what matters here."""
    site = replace(p.site(), dtype="bfloat16", device="cpu" if arch == "cpu" else "cuda")
    spec = replace(site.spec, mask=Mask(p.mask, None, Segments(Operand(0), Operand(0))))
    return plan(replace(site, spec=spec), arch, schedule)


def results(p: KeyedAttention, chosen: Plan) -> list[Tensor]:
    """out, log-sum-exp, dq, dk, dv."""
    tiles = chosen.forward_tiles
    assert tiles is not None
    if chosen.forward == "hopper":  # its row blocks do not know of one another
        tiles = replace(tiles, block_q=64)
    out, lse = reference_forward.forward(p.q, p.k, p.v, p.extras, p.spec(1), tiles)
    return [out, lse, *reference.backward(p.do, p.q, p.k, p.v, out, lse, p.extras, p.spec(3), chosen)]


def document(band: Band, *, length: int = 200, dim: int = 64, group: int = 1) -> KeyedAttention:
    return KeyedAttention.random(
        length, length, band, dims=(dim, dim), batch=1, kv_heads=2 if group == 1 else 1, group=group, documents="same"
    )  # fmt: skip


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[bool]:
    return [torch.equal(x, y) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize(("arch", "dim", "group"), GRID, ids=str)
def test_a_document_keeps_its_bits(band: Band, arch: str, dim: int, group: int) -> None:
    """Alone, first, between others, and last."""
    p = document(band, dim=dim, group=group)
    chosen, length = planned(p, arch), p.q.shape[2]
    rest = -length % TILE
    alone = of_document(results(among(p, 0, others=rest), chosen), 0, length)
    for before in (place * TILE for place in PLACES):
        for seed, factor in ((1, 1.0), (2, 1e4)):
            packed = among(p, before, others=OTHERS + rest, seed=seed, factor=factor)
            assert same(of_document(results(packed, chosen), before, length), alone) == [True] * 5, (before, seed)
    moved = of_document(results(among(p, TILE // 2 + 5, others=OTHERS + rest), chosen), TILE // 2 + 5, length)
    assert same(moved, alone) == [False] * 5  # negative control


def test_chunks_have_the_bits_of_their_own_tokens() -> None:
    """Segments that are places divided by a constant, as in Llama 4, wherever the constant is a multiple of TILE."""
    p = document(Band(0), length=4 * TILE, group=2)
    chosen = planned(p, "sm_90")

    def of_chunk(place: int, size: int) -> tuple[list[Tensor], list[Tensor]]:
        """A chunk's results among the other chunks, and the results of its tokens alone."""
        ids, part = (torch.arange(4 * TILE) // size)[None], slice(place * size, (place + 1) * size)
        q, k, v, do = (t[:, :, part] for t in (p.q, p.k, p.v, p.do))
        alone = replace(p, q=q, k=k, v=v, do=do, segments=segment_ids("same", 1, size, size))
        whole = results(replace(p, segments=(ids, ids)), chosen)
        return of_document(whole, part.start, size), results(alone, chosen)

    assert [same(*of_chunk(place, 2 * TILE)) for place in (0, 1)] == [[True] * 5] * 2
    assert same(*of_chunk(1, TILE // 4 * 5)) == [False] * 5  # negative control


def test_no_tile_is_larger() -> None:
    """Tiles of keys, anywhere, and of queries where dk and dv are added; queries of a forward are independent."""
    tiles = [t for row in PORTABLE.values() for t in row]
    for candidate in (*tiles, Candidate(REFERENCE, REFERENCE), *HOPPER.values()):
        for shape in (candidate.dkdv, candidate.dq or candidate.dkdv):
            assert TILE % shape.block_q == TILE % shape.block_kv == 0
    for forward in (*FORWARD_TILES.values(), REFERENCE, *(config.tiles for config in FORWARD_CONFIGS.values())):
        assert TILE % forward.block_kv == 0


@pytest.mark.parametrize("arch", WORKERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_segments_are_planned_alike_in_all_heads(arch: str, dtype: str) -> None:
    """Also beside other components, and in no other mask."""
    for dim, band in ((d, b) for d in (32, 64, 96, 128, 256) for b in (*BANDS, Band(None, 40))):
        for others in ("segments(0,0)", "segments(0,1) & keys(2)", "segments(0,0) & dense(1)"):
            mask = Mask.parse(others if band.is_full else f"{band} & {others}")
            device = "cpu" if arch == "cpu" else "cuda"
            site = Site(device, dtype, 2, 16, 4, 4096, 4096, dim, dim, AttentionSpec(mask, 0.1))  # type: ignore[arg-type]
            if dim == 256 and (arch, dtype) != ("sm_90", "bfloat16"):
                continue
            chosen = plan(site, arch)
            assert chosen.schedule in ("ascending", "spt", "two_pass")
            if chosen.kernel == "hopper" and band in (Band(0), Band(0, 99)):
                assert chosen.schedule == "spt"
            if chosen.kernel == "hopper" and others == "segments(0,0)" and band.is_full:
                assert chosen.schedule == "ascending"
