"""Forwards of documents that a mask names, on a GPU: values, bits, and which kernel computes a batch element.

See Note [Documents of a mask] in `kernels.common.document_tiles`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dash_inductor.kernels.hopper.forward import build, launch
from dash_inductor.model import AttentionSpec, Band, Mask, Operand, Segments
from dash_inductor.model.components import Interval
from dash_inductor.model.plan import Plan, Tiles
from dash_inductor.operators.document_tiles import document_tiles_of_mask
from dash_inductor.operators.mask_tables import mask_tables

from ..support.hopper import MARKS
from ..support.repeats import bits, differing_runs
from ..support.table_words import BATCHES, documents_of_masks, same_work_lists_of_masks

pytestmark = MARKS

CAUSAL = Band(0)
BANDS = [CAUSAL, Band(), Band(0, 200), Band(-70, 300)]
DTYPES = {(64, 64): torch.float16, (128, 128): torch.bfloat16, (192, 128): torch.bfloat16, (256, 256): torch.float16}
Results = list[Tensor]


@dataclass(frozen=True)
class Call:
    """A forward whose batch elements have documents of these kinds, see `table_words.documents_of_masks`.

    Its mask has segment ids or, with `bounds`, lower bounds of keys.
    """

    kinds: tuple[str, ...]
    band: Band = CAUSAL
    dims: tuple[int, int] = (128, 128)
    length: int = 1500
    group: int = 2
    kv_heads: int = 2
    order: tuple[int, ...] = (0, 2, 1, 3)
    seed: int = 0
    bounds: bool = False

    @property
    def spec(self) -> AttentionSpec:
        component = Interval(Operand(0), None) if self.bounds else Segments(Operand(0), Operand(0))
        return AttentionSpec(Mask(self.band, component), self.dims[0] ** -0.5, orders=(self.order,))

    @property
    def plan(self) -> Plan:
        tiles = build.FORWARD_CONFIGS[self.dims].tiles
        return Plan("hopper", "ascending", "hopper", Tiles(64, 128, 8, 2), forward_tiles=tiles)

    def ids(self) -> Tensor:
        return documents_of_masks(random.Random(self.seed), self.kinds, self.length).cuda()

    def tensors(self) -> list[Tensor]:
        generator = torch.Generator("cuda").manual_seed(self.seed)
        heads = self.kv_heads * self.group, self.kv_heads, self.kv_heads
        return [
            torch.randn(
                len(self.kinds), self.length, n, dim, device="cuda", dtype=DTYPES[self.dims], generator=generator
            ).transpose(1, 2)
            for n, dim in zip(heads, (self.dims[0], *self.dims), strict=True)
        ]

    def extras(self, ids: Tensor, documents: bool = True) -> list[Tensor]:
        """The ids and what the kernels read; without `documents` all is computed by lists."""
        mask, plan, heads = str(self.spec.mask), str(self.plan), self.kv_heads * self.group
        tables = mask_tables([ids], self.length, self.length, len(ids), heads, self.kv_heads, mask, plan, False)
        found = [ids, *(tables[i] for i in range(5) if i != 1 or not self.bounds)]
        return [*found, *document_tiles_of_mask(ids if self.bounds else tables[0], mask, plan)] if documents else found

    def run(
        self, tensors: Sequence[Tensor], ids: Tensor, *, ctas: int | None = None, documents: bool = True
    ) -> Results:
        return self.prepared(tensors, self.extras(ids, documents), ctas=ctas)()

    def prepared(
        self, tensors: Sequence[Tensor], extras: list[Tensor], *, ctas: int | None = None
    ) -> Callable[[], Results]:
        """A function that runs the forward, with these tables, again and again."""
        run = launch.prepare(tensors, extras, self.spec, ctas=ctas)
        return lambda: [*run((*tensors, extras))]

    def keep(self, ids: Tensor) -> Tensor:
        distance = torch.arange(self.length)[:, None] - torch.arange(self.length)
        shown = torch.ones(self.length, self.length, dtype=torch.bool)
        shown &= distance >= self.band.lo if self.band.lo is not None else True
        shown &= distance <= self.band.hi if self.band.hi is not None else True
        keys = torch.arange(self.length).cuda()
        return shown.cuda() & (keys >= ids[:, :, None] if self.bounds else ids[:, :, None] == ids[:, None])

    def exact(self, tensors: Sequence[Tensor], ids: Tensor) -> Results:
        q, k, v = (t.double() for t in tensors)
        k, v = (t.repeat_interleave(self.group, 1) for t in (k, v))
        s = (q @ k.mT * self.dims[0] ** -0.5).masked_fill(~self.keep(ids)[:, None], -torch.inf)
        return [s.softmax(-1) @ v, s.logsumexp(-1)]


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(bits(x.contiguous()), bits(y.contiguous())) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dims", DTYPES, ids=str)
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_values(dims: tuple[int, int], band: Band) -> None:
    """Every kind of batch element, and results in every order of dimensions."""
    for seed, order in enumerate(((0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3))):
        call = Call(BATCHES, band, dims, order=order, seed=seed)
        tensors, ids = call.tensors(), call.ids()
        for ours, true, tolerance in zip(call.run(tensors, ids), call.exact(tensors, ids), (2e-2, 2e-3), strict=True):
            assert float((ours.double() - true).abs().max()) <= tolerance
        assert (
            call.run(tensors, ids)[0].stride()
            == torch.empty([tensors[0].shape[:3][d] if d < 3 else dims[1] for d in order])
            .permute([order.index(d) for d in range(4)])
            .stride()
        )


@pytest.mark.parametrize("band", [CAUSAL, Band(0, 200)], ids=str)
def test_lower_bounds_of_keys(band: Band) -> None:
    """The first token of the query's document as a bound: where these are documents, the bits of segment ids."""
    kinds = "documents", "one document", "any numbers", "single tokens", "documents"
    call = Call(kinds, band, bounds=True)
    tensors, ids = call.tensors(), call.ids()
    found = call.run(tensors, ids)
    for ours, true, tolerance in zip(found, call.exact(tensors, ids), (2e-2, 2e-3), strict=True):
        assert float((ours.double() - true).abs().max()) <= tolerance
    by_segments = replace(call, bounds=False).run(tensors, ids)
    for b in (0, 1, 3, 4):
        assert same([t[b] for t in found], [t[b] for t in by_segments]), b
    assert not same([t[0] for t in found], [t[0] for t in call.run(tensors, ids, documents=False)])


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_bits(band: Band) -> None:
    """A batch element has the same bits alone and in any batch, with any number of CTAs.

    Those that lists compute have the bits of lists alone; those whose documents begin with tiles have them, too, which
    shows that both kernels add in one order; others have not, which shows that documents were computed by their own
    tiles.
    """
    call = Call((*BATCHES, *reversed(BATCHES)), band)
    tensors, ids = call.tensors(), call.ids()
    ids[-1] = torch.arange(call.length, device="cuda") // 384 * 384  # documents that begin with tiles
    whole, lists = call.run(tensors, ids), call.run(tensors, ids, documents=False)
    listed = call.extras(ids)[-1].tolist()
    listed = listed[1 : 1 + listed[0]]
    assert 0 < len(listed) < len(ids) - 2
    for ctas in (1, 7, 131):
        assert same(whole, call.run(tensors, ids, ctas=ctas)), ctas
    for b in range(len(ids)):
        own = [t[b : b + 1] for t in tensors]
        alone = replace(call, kinds=call.kinds[b : b + 1]).run(own, ids[b : b + 1])
        assert same(alone, [t[b : b + 1] for t in whole]), call.kinds[b]
        equal = same([t[b] for t in whole], [t[b] for t in lists])
        begin_with_tiles = not (ids[b].unique() % 128).any()
        assert equal == (b in listed or begin_with_tiles), call.kinds[b]


def test_a_document_has_the_same_bits_at_any_place() -> None:
    """Beside documents of any values, NaN among them."""
    call = Call(("documents",), length=1000)
    tensors = call.tensors()
    expected = None
    for before in (0, 1, 77, 128, 300):
        numbers = torch.zeros(1, 1000, dtype=torch.int64)
        numbers[:, before:] += 1
        numbers[:, before + 600 :] += 1
        first = (numbers[0] == numbers[0][:, None]).int().argmax(1)[None].int().cuda()
        moved = [torch.roll(t, before, 2) for t in tensors]
        for t in moved:
            t[:, :, :before] = t[:, :, before + 600 :] = torch.nan if before else 3.0
        found = [t[:, :, before : before + 600] for t in call.run(moved, first)]
        expected = expected or found
        assert same(found, expected), before


def test_repeats() -> None:
    """Idle, under load, and in memory that held NaN."""
    for band, dims in itertools.product(BANDS[:2], [(64, 64), (128, 128)]):
        call = Call(BATCHES, band, dims)
        tensors, ids = call.tensors(), call.ids()
        run = call.prepared(tensors, call.extras(ids))
        assert differing_runs(run, 500) == 0
        assert differing_runs(run, 500, load=True) == 0
        assert differing_runs(lambda: call.run(tensors, ids), 20, poisoned=True) == 0  # noqa: B023  # called at once


def test_cuda_graphs() -> None:
    """A graph computes whatever documents its ids name when it is replayed, those that lists compute among them."""
    call = Call(("documents", "one document", "ids that return"))
    tensors, ids = call.tensors(), call.ids()
    kinds = [*itertools.permutations(call.kinds), ("ids that return",) * 3, ("one document",) * 3]
    others = [replace(call, kinds=each, seed=1).ids() for each in kinds]
    expected = [call.run(tensors, each) for each in others]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call.run(tensors, ids)
    for other, results in zip(others, expected, strict=True):
        ids.copy_(other)
        graph.replay()
        assert same(found, results)


def test_work_lists() -> None:
    """Those of the definition."""
    for seed in range(30):
        same_work_lists_of_masks(random.Random(seed), "cuda", 5000 if seed % 3 == 0 else 700)
