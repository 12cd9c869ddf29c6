"""The Hopper kernel under masks that are data: gradients against fp64, the bits of bands, reproducibility.

Every call has a batch element for each kind of mask, so that few kernels are compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from torch import Tensor

from dash_inductor.errors import ArgumentError
from dash_inductor.kernels.hopper.backward.data import BackwardData
from dash_inductor.model import AttentionSpec, Band, Mask
from dash_inductor.schedule import Problem
from dash_inductor.schedule.tile_schedule import ClosedForm

from ..support import hopper_calls
from ..support.attention import Attention, Gradients, errors
from ..support.calls import BSHD, backward_spec
from ..support.hopper import MARKS, plan_of
from ..support.hopper_data import KINDS, NO_KEY, data_of, keep_of, segment_ids_of
from ..support.repeats import bits, differing_runs, poison

pytestmark = MARKS

SEGMENT_IDS, DENSE, BOTH = "keys(0)", "dense(0)", "keys(0) & dense(1)"


@dataclass(frozen=True)
class Masked:
    """A problem under a mask that is data; calling it gives the gradients.

    Args:
        problem: with zeros in all positions that take no part.
        whole: who sees whom, bool [batch, 1 or q heads, q_len, kv_len].
    """

    problem: Attention
    whole: Tensor
    mask: Mask
    schedule: str
    data: BackwardData
    out: Tensor
    lse: Tensor

    @staticmethod
    def of(
        p: Attention, schedule: str, segment_ids: tuple[Tensor, Tensor] | None, dense: Tensor | None = None
    ) -> Masked:
        (batch, q_heads, q_len, _), (_, kv_heads, kv_len, _) = p.q.shape, p.k.shape
        whole = keep_of(p.mask, segment_ids, dense, (batch, q_len, kv_len))
        text = BOTH if segment_ids is not None and dense is not None else DENSE if segment_ids is None else SEGMENT_IDS
        mask = dataclasses.replace(Mask.parse(text), band=p.mask)
        tiles = plan_of(p, schedule).dkdv
        work = Problem(p.mask, q_len, kv_len, tiles.block_q, tiles.block_kv, batch, q_heads, head_chunk=4)
        data = data_of(ClosedForm(schedule, work), whole, segment_ids, dense)
        data = BackwardData(*(None if t is None else t.cuda() for t in data))
        whole = whole.cuda()
        by_kv_head = whole.expand(-1, q_heads, -1, -1).unflatten(1, (kv_heads, -1)).any(2)
        rows, keys = whole.any(3)[..., None], by_kv_head.any(2)[..., None]
        q, do = (torch.where(rows, t, 0.0) for t in (p.q, p.do))
        k, v = (torch.where(keys, t, 0.0) for t in (p.k, p.v))
        p = dataclasses.replace(p, q=q, k=k, v=v, do=do)
        s = scores(p, whole)
        lse = torch.logsumexp(s, -1)
        out = torch.softmax(s, -1).nan_to_num() @ p.v.double().repeat_interleave(p.group, 1)
        return Masked(p, whole, mask, schedule, data, out.to(p.q.dtype), lse.float())

    def __call__(self) -> Gradients:
        p = self.problem
        spec, plan = AttentionSpec(self.mask, p.scale, (BSHD,) * 3), plan_of(p, self.schedule)
        return hopper_calls.backward(*self.given, self.out, self.lse, spec, plan, self.data)

    @cached_property
    def given(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dO, q, k and v as the kernel gets them: NaN where the problem has zeros, since nobody sees it."""
        p = self.problem
        by_kv_head = self.whole.expand(-1, p.q.shape[1], -1, -1).unflatten(1, (p.k.shape[1], -1)).any(2)
        rows, keys = self.whole.any(3)[..., None], by_kv_head.any(2)[..., None]
        do, q = (torch.where(rows, t, torch.nan) for t in (p.do, p.q))
        k, v = (torch.where(keys, t, torch.nan) for t in (p.k, p.v))
        return do, q, k, v

    def elements(self, which: Sequence[int]) -> Masked:
        """Some elements of the batch, in this order."""
        index = torch.tensor(which, device="cuda")
        p = self.problem
        tables = [int(t.shape[0]) // p.q.shape[0] for t in self.data[3:6] if t is not None]
        of_tables = [index[:, None] * n + torch.arange(n, device="cuda") for n in tables]
        data = self.data
        assert data.seen_bits is None
        picked = [None if t is None else t[index] for t in (data.q_vectors, data.kv_vectors, data.keys_seen)]
        of_tile_schedules = data.visits, data.steps, data.contributions
        picked += [t[i.flatten()] for t, i in zip(of_tile_schedules, of_tables, strict=True)]
        problem = dataclasses.replace(p, q=p.q[index], k=p.k[index], v=p.v[index], do=p.do[index])
        data = BackwardData(*picked)
        return dataclasses.replace(
            self, problem=problem, whole=self.whole[index], data=data, out=self.out[index], lse=self.lse[index]
        )


def scores(p: Attention, whole: Tensor) -> Tensor:
    """Scaled scores in fp64, minus infinity where the mask hides."""
    s = (p.q.double() @ p.k.double().repeat_interleave(p.group, 1).mT) * p.scale
    return s.masked_fill(~whole, float("-inf"))


def gradients(run: Masked, *, rounded: bool) -> Gradients:
    """In fp64, from the run's out and log-sum-exp; if `rounded`, P and dS are rounded before they are multiplied."""
    p, dtype = run.problem, run.problem.q.dtype
    q, do, out = (t.double() for t in (p.q, p.do, run.out))
    k, v = (t.double().repeat_interleave(p.group, 1) for t in (p.k, p.v))
    lse = torch.where(run.lse == -torch.inf, torch.inf, run.lse).double()[..., None]
    probabilities = torch.exp(scores(p, run.whole) - lse)
    ds = probabilities * (do @ v.mT - (out * do).sum(-1, keepdim=True))
    if rounded:
        probabilities, ds = (t.to(dtype).double() for t in (probabilities, ds))
    dq, dk, dv = ds @ k * p.scale, ds.mT @ q * p.scale, probabilities.mT @ do
    dk, dv = (t.unflatten(1, (-1, p.group)).sum(2) for t in (dk, dv))
    if rounded:
        dq, dk, dv = (t.to(dtype) for t in (dq, dk, dv))
    return dq, dk, dv


def check(run: Masked, got: Gradients) -> None:
    """At most twice the error of roundings that cannot be avoided; exact zeros where nobody sees and is seen."""
    exact = gradients(run, rounded=False)
    own, unavoidable = errors(got, exact), errors(gradients(run, rounded=True), exact)
    p = run.problem
    rounding = 16 * torch.finfo(torch.float32).eps * float(p.do.abs().max() * p.v.abs().max()) * p.q.shape[3]
    for name, a, b in zip(("dq", "dk", "dv"), own, unavoidable, strict=True):
        assert a <= 2 * b + rounding, f"{name}: error {a:.2e}, unavoidable {b:.2e} at {tuple(p.q.shape)} {run.mask}"
    assert not any(g.isnan().any() for g in got)
    rows = run.whole.any(3).expand(p.q.shape[:3])
    keys = run.whole.any(2).expand(-1, p.q.shape[1], -1).unflatten(1, (p.k.shape[1], -1)).any(2)
    assert (got[0][~rows] == 0).all()
    assert all((g[~keys] == 0).all() for g in got[1:])


def problem(
    dims: tuple[int, int], band: Band, q_len: int, kv_len: int, *, batch: int = len(KINDS), kv_heads: int = 2,
    group: int = 1, dtype: torch.dtype = torch.bfloat16,
) -> Attention:  # fmt: skip
    return Attention.random(
        q_len, kv_len, dims[0], band, batch=batch, kv_heads=kv_heads, group=group, dtype=dtype, value_dim=dims[1]
    )


def with_segment_ids(p: Attention, schedule: str, kinds: Sequence[str] = KINDS) -> Masked:
    segment_ids = segment_ids_of(p.mask, p.q.shape[2], p.k.shape[2], kinds)
    return Masked.of(p, schedule, segment_ids)


BF16, HALF = torch.bfloat16, torch.float16
# All head dims under causal masks; the other bands and fp16 spread over them.
GRID = [
    ((64, 64), Band(0), "bent_fold", 1, BF16),
    ((64, 64), Band(-40, 40), "descending", 4, HALF),
    ((64, 64), Band(), "ascending", 2, BF16),
    ((96, 96), Band(0), "spt", 1, BF16),
    ((128, 128), Band(0), "bent_fold", 4, BF16),
    ((128, 128), Band(), "ascending", 1, HALF),
    ((128, 128), Band(0, 199), "spt", 1, BF16),
    ((128, 128), Band(0, None, "bottom_right"), "bent_fold", 2, BF16),
    ((192, 128), Band(0), "spt", 2, BF16),
    ((192, 192), Band(0), "bent_fold", 1, BF16),
    ((256, 256), Band(0), "spt", 2, HALF),
    ((256, 256), Band(), "ascending", 1, BF16),
]
LENGTHS = [
    (512, 512),
    (300, 1000),
    (1000, 300),
    (129, 129),
    (1, 257),
    (200, 1),
    (8300, 300),
]  # the last bends tile schedules
grid = pytest.mark.parametrize(("dims", "band", "schedule", "group", "dtype"), GRID, ids=str)


@grid
def test_segment_ids(dims: tuple[int, int], band: Band, schedule: str, group: int, dtype: torch.dtype) -> None:
    """Padding on both sides, holes, documents, ids that come again, batch elements in which nobody sees anything."""
    for q_len, kv_len in LENGTHS:
        run = with_segment_ids(problem(dims, band, q_len, kv_len, group=group, dtype=dtype), schedule)
        poison()
        check(run, run())


@grid
def test_ones_have_the_bits_of_the_band(
    dims: tuple[int, int], band: Band, schedule: str, group: int, dtype: torch.dtype
) -> None:
    """In all heads."""
    for q_len, kv_len in ((512, 512), (300, 1000), (1000, 300), (8300, 300)):
        p = problem(dims, band, q_len, kv_len, batch=2, kv_heads=3, group=group, dtype=dtype)
        run = with_segment_ids(p, schedule, ("ones", "ones"))
        p = run.problem
        spec, plan = backward_spec(band, p.scale), plan_of(p, schedule)
        expected = hopper_calls.backward(p.do, p.q, p.k, p.v, run.out, run.lse, spec, plan)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(expected, run(), strict=True))


DENSE_SHAPES = ["bhqk", "b1qk", "1hqk", "11qk", "b11k", "1hq1"]


@pytest.mark.parametrize(
    ("dims", "band", "schedule", "group"),
    [
        ((64, 64), Band(), "ascending", 2),
        ((128, 128), Band(0), "bent_fold", 1),
        ((192, 128), Band(0), "spt", 2),
        ((256, 256), Band(-90), "spt", 2),
    ],
    ids=str,
)
def test_dense(dims: tuple[int, int], band: Band, schedule: str, group: int) -> None:
    """Any broadcasting and any strides, of few and of many pairs; whole tiles that are hidden."""
    generator = torch.Generator().manual_seed(0)
    for (q_len, kv_len), letters in zip([(512, 512), (300, 1000), (4200, 301)] * 2, DENSE_SHAPES, strict=True):
        p = problem(dims, band, q_len, kv_len, batch=2, group=group)
        full = {"b": 2, "h": p.q.shape[1], "q": q_len, "k": kv_len, "1": 1}
        dense = torch.rand([full[letter] for letter in letters], generator=generator) < 0.3
        dense[..., : kv_len // 3] &= (letters != "b11k") & (dense.shape[3] > 1)
        if letters == "bhqk":
            dense = dense.mT.contiguous().mT
        for segment_ids in (None, segment_ids_of(band, q_len, kv_len, ("packed", "left padding"))):
            run = Masked.of(p, schedule, segment_ids, dense)
            poison()
            check(run, run())


REPEATED = [
    ((64, 64), Band(0), "bent_fold", 1),
    ((128, 128), Band(0), "bent_fold", 4),
    ((128, 128), Band(), "ascending", 1),
    ((192, 128), Band(0), "spt", 1),
    ((256, 256), Band(0), "spt", 2),
]
repeated = pytest.mark.parametrize(("dims", "band", "schedule", "group"), REPEATED, ids=str)


@repeated
def test_repeats(dims: tuple[int, int], band: Band, schedule: str, group: int) -> None:
    run = with_segment_ids(problem(dims, band, 8300, 1000, group=group), schedule)
    assert differing_runs(run, 200, load=True) == 0
    assert differing_runs(run, 20, poisoned=True) == 0


@repeated
def test_batch_invariance(dims: tuple[int, int], band: Band, schedule: str, group: int) -> None:
    """A batch element has the same bits at another place, among others, and alone."""
    run = with_segment_ids(problem(dims, band, 8300, 500, kv_heads=3, group=group), schedule)
    expected = run()
    for which in ([7, 2, 4, 0], [5], [6], [4]):
        got = run.elements(which)()
        assert all(torch.equal(a[which], b) for a, b in zip(expected, got, strict=True))


def test_what_unseeing_rows_have_in_out_and_log_sum_exp() -> None:
    """Only that their log-sum-exp is -inf counts."""
    run = with_segment_ids(problem((128, 128), Band(0), 300, 300), "bent_fold")
    blind = None if run.data.q_vectors is None else (run.data.q_vectors == NO_KEY)[..., None]
    assert blind is not None
    assert blind.any()
    other = dataclasses.replace(run, out=torch.where(blind, 7.0, run.out))
    assert all(map(torch.equal, run(), other()))


def test_graph_replay() -> None:
    run = with_segment_ids(problem((128, 128), Band(0), 300, 300), "bent_fold")
    expected = [t.clone() for t in run()]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    assert all(map(torch.equal, expected, captured))


def test_data_and_mask_go_together() -> None:
    run = with_segment_ids(problem((128, 128), Band(0), 300, 300), "bent_fold")
    p, plan = run.problem, plan_of(run.problem, "bent_fold")
    tensors = *run.given, run.out, run.lse
    with pytest.raises(ArgumentError, match="extras"):
        hopper_calls.backward(*tensors, AttentionSpec(run.mask, p.scale, (BSHD,) * 3), plan)
