"""Packed documents on a GPU: a document has the same bits wherever it lies, beside whatever.

Hopper kernels through `torch.compile` of a model's attention, portable ones through the operators.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor import config, sites
from dash_inductor.model import Band

from ..support.documents import OTHERS, PLACES, TILE, among, of_document
from ..support.keyed import KeyedAttention, segment_ids
from ..support.portable_plans import portable_plan
from ..support.repeats import bits
from ..support.together import Together, side_by_side

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

BANDS = [Band(0), Band(), Band(0, 299)]
GRID = [(64, 1, torch.bfloat16), (128, 4, torch.bfloat16), (128, 1, torch.float16), (256, 2, torch.bfloat16)]
"""Head dimensions, query heads of a group, and dtypes."""
LENGTHS = {256: 256}
"""By head dimension, where it is not 700."""
Run = Callable[[KeyedAttention], list[Tensor]]


@pytest.fixture(scope="module", autouse=True)
def compiled_side_by_side() -> Iterator[None]:
    with side_by_side():
        yield


def document(
    length: int, band: Band, dim: int, group: int, dtype: torch.dtype, *, batch: int = 2, kv_heads: int = 2
) -> KeyedAttention:  # fmt: skip
    return KeyedAttention.random(
        length, length, band, dims=(dim, dim), batch=batch, kv_heads=kv_heads, group=group, dtype=dtype,
        scale=dim**-0.5, documents="same", device="cuda",
    )  # fmt: skip


def same(a: list[Tensor], b: list[Tensor]) -> list[bool]:
    return [torch.equal(bits(x.contiguous()), bits(y.contiguous())) for x, y in zip(a, b, strict=True)]


def check(run: Run, p: KeyedAttention) -> None:
    """The document alone, first, between others and last."""
    length = p.q.shape[2]
    alone = run(p)
    for place, (seed, factor) in itertools.product(PLACES, ((1, 1.0), (2, 8.0))):
        found = of_document(run(among(p, place * TILE, seed=seed, factor=factor)), place * TILE, length)
        assert same(found, alone) == [True] * len(alone), (place, seed, length)
    for before in (1, OTHERS - 29):  # negative control: tiles of the backward begin elsewhere in the document
        moved = of_document(run(among(p, before)), before, length)
        assert not any(same(moved, alone)[1:]), before


def model(schedule: str = "auto", *, chunk: int = 0) -> Run:
    """out, dq, dk, dv of a compiled attention under `schedule`; with `chunk`, segments are places divided by it."""
    torch._dynamo.reset()

    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, lo: int | None, hi: int | None) -> Tensor:
        place = torch.arange(q.shape[2], device=q.device)
        if chunk:
            ids = (place // chunk).expand(q.shape[0], -1)
        keep = ids[:, None, :, None] == ids[:, None, None, :]
        if lo is not None:
            keep = keep & (place <= place[:, None] - lo)
        if hi is not None:
            keep = keep & (place >= place[:, None] - hi)
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)

    compiled = torch.compile(attend, dynamic=False, fullgraph=True)

    def run(p: KeyedAttention) -> list[Tensor]:
        assert p.segments is not None
        leaves = [t.detach().requires_grad_() for t in (p.q, p.k, p.v)]
        with config.patch(strict=True, schedule=schedule):
            out = compiled(*leaves, p.segments[0], p.mask.lo, p.mask.hi)
            out.backward(p.do)
        return [out.detach(), *(t.grad for t in leaves if t.grad is not None)]

    return run


def kernels() -> set[tuple[str, str]]:
    """Kernel and schedule of all sites so far."""
    return {(r.plan.kernel, r.plan.schedule) for r in sites() if r.plan is not None}


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize(("dim", "group", "dtype"), GRID, ids=str)
def test_a_document_of_a_model(dim: int, group: int, dtype: torch.dtype, band: Band) -> None:
    check(model(), document(LENGTHS.get(dim, 700), band, dim, group, dtype))
    found = kernels()
    if torch.cuda.get_device_capability() == (9, 0) and (dim, band) != (64, BANDS[2]):  # the planner's choice
        assert ("hopper", "ascending" if band.is_full else "spt") in found, found


def test_huge_neighbours() -> None:
    """Zero times anything finite is zero: neighbours may have scores in the billions, whose exponentials still are."""
    run, p = model(), document(300, Band(0), 128, 2, torch.bfloat16)
    alone = run(p)
    for place in PLACES:
        found = of_document(run(among(p, place * TILE, factor=2.0**13)), place * TILE, 300)
        assert same(found, alone) == [True] * 4, place


def test_chunks() -> None:
    """Segments that are places divided by a multiple of TILE, as in Llama 4: the bits of a call on each chunk alone."""
    p = document(4 * 256, Band(0), 128, 2, torch.bfloat16)
    whole, alone = (
        model(chunk=256)(p),
        model(),
    )  # the segments of the latter are data, with which a call is planned alike
    for first in range(0, 4 * 256, 256):
        q, k, v, do = (t[:, :, first : first + 256] for t in (p.q, p.k, p.v, p.do))
        own = replace(p, q=q, k=k, v=v, do=do, segments=segment_ids("same", 2, 256, 256, device="cuda"))
        assert same(of_document(whole, first, 256), alone(own)) == [True] * 4, first


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="for sm_90")
def test_heads_are_alike() -> None:
    """Equal heads have equal bits, wherever they are; one between them, whose queries are others, has its own."""
    for schedule in ("auto", "bent_fold", "descending"):
        p = document(900, Band(0), 128, 1, torch.bfloat16, kv_heads=1)
        q, k, v, do = (t.expand(-1, 3, -1, -1).contiguous() for t in (p.q, p.k, p.v, p.do))
        q[:, 1] = -q[:, 1]
        found = model(schedule)(among(replace(p, q=q, k=k, v=v, do=do), 3 * TILE))
        dq = of_document(found, 3 * TILE, 900)[1]
        assert [torch.equal(dq[:, 0], dq[:, head]) for head in (1, 2)] == [False, True], schedule


@pytest.mark.parametrize("schedule", ["two_pass", "spt"])
def test_a_document_in_the_portable_kernels(schedule: str) -> None:
    """Bands and groups at three head dimensions and dtypes in one graph, for each length of a sequence."""
    cases = [
        (Band(0), 64, 2, torch.bfloat16),
        (Band(), 128, 1, torch.float16),
        (Band(0, 299), 32, 1, torch.bfloat16),
        (Band(0), 64, 1, torch.float32),
    ]
    problems = [document(300, band, dim, group, dtype) for band, dim, group, dtype in cases]
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    plans = [portable_plan(p.site(), arch, schedule) for p in problems]
    alone = Together(problems, plans, with_backward=True)(problems)
    alone = [tuple(t.clone() for t in results) for results in alone]
    packed = Together([among(p, 0) for p in problems], plans, with_backward=True)
    for place, factor in itertools.product(PLACES, (1.0, 8.0)):
        results = packed([among(p, place * TILE, factor=factor) for p in problems])
        for own, of_all in zip(alone, results, strict=True):
            assert same(of_document(of_all, place * TILE, 300), list(own)) == [True] * 5, (place, factor)
    moved = packed([among(p, 1) for p in problems])
    for own, of_all in zip(alone, moved, strict=True):
        assert not any(same(of_document(of_all, 1, 300), list(own)))  # negative control
