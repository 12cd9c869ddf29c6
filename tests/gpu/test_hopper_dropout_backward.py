"""Dropout in the Hopper backward: the mask that is drawn, gradients against fp64 with it, reproducibility."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dash_inductor.errors import ArgumentError
from dash_inductor.kernels.hopper.backward.data import BackwardData
from dash_inductor.kernels.reference.dropout import kept
from dash_inductor.model import AttentionSpec, Band, Mask, Operand
from dash_inductor.model.dropout import Dropout

from ..support import hopper_calls
from ..support.attention import Attention, Gradients, errors
from ..support.calls import BSHD
from ..support.hopper import MARKS, plan_of
from ..support.hopper_data import band_of
from ..support.repeats import bits, differing_runs, poison
from .test_hopper_data import scores, with_segment_ids

pytestmark = MARKS

BF16, HALF = torch.bfloat16, torch.float16
GRID = [
    ((64, 64), Band(0), "bent_fold", 2, BF16),
    ((128, 128), Band(), "ascending", 1, HALF),
    ((128, 128), Band(0, 199), "spt", 2, BF16),
    ((192, 128), Band(0), "spt", 1, BF16),
    ((256, 256), Band(0), "spt", 2, BF16),
]
grid = pytest.mark.parametrize(("dims", "band", "schedule", "group", "dtype"), GRID, ids=str)
LENGTHS = [(300, 300), (129, 515), (8300, 129), (1, 50)]  # no kv tile divides them: one kernel serves all
SEEDS = [0, -1, (1 << 40) + 12345, 7]


@dataclass(frozen=True)
class Dropped:
    """A problem with dropout; calling it gives the gradients.

    Args:
        whole: who sees whom, bool [batch, 1 or q heads, q_len, kv_len].
        kept: bool [batch, q heads, q_len, kv_len].
    """

    problem: Attention
    mask: Mask
    schedule: str
    whole: Tensor
    kept: Tensor
    seed: Tensor
    dropout: Dropout
    out: Tensor
    lse: Tensor
    data: BackwardData | None = None

    @staticmethod
    def of(p: Attention, schedule: str, seed: int, probability: float = 0.1, *, segment_ids: bool = False) -> Dropped:
        """With the batch's masks that are data, if `segment_ids`."""
        (batch, q_heads, q_len, _), kv_len = p.q.shape, p.k.shape[2]
        dropout = Dropout(probability, Operand(0))
        # an element of a tensor of seeds: its address is a multiple of 8 bytes only
        seeds = torch.tensor([99, seed], device="cuda")[1:]
        drawn = kept_pairs(dropout, seeds, batch, q_heads, q_len, kv_len)
        mask, data = Mask(p.mask), None
        whole = band_of(p.mask, q_len, kv_len).cuda().expand(batch, 1, -1, -1)
        if segment_ids:
            masked = with_segment_ids(p, schedule)
            p, mask, data, whole = masked.problem, masked.mask, masked.data, masked.whole
        s = scores(p, whole)
        lse = torch.logsumexp(s, -1)
        of_kept = torch.softmax(s, -1).nan_to_num() * drawn * dropout.rescale
        out = (of_kept @ p.v.double().repeat_interleave(p.group, 1)).to(p.q.dtype)
        return Dropped(p, mask, schedule, whole, drawn, seeds, dropout, out, lse.float(), data)

    def __call__(self) -> Gradients:
        return self.with_probability(self.dropout.p)

    def with_probability(self, probability: float) -> Gradients:
        p, plan = self.problem, plan_of(self.problem, self.schedule)
        spec = dataclasses.replace(self._spec(), dropout=dataclasses.replace(self.dropout, p=probability))
        tensors = p.do, p.q, p.k, p.v, self.out, self.lse
        return hopper_calls.backward(*tensors, spec, plan, self.data, dropout=self.seed)

    def without(self) -> Gradients:
        """The run by the kernel without dropout."""
        p = self.problem
        plan = plan_of(p, self.schedule)
        return hopper_calls.backward(p.do, p.q, p.k, p.v, self.out, self.lse, self._spec(), plan, self.data)

    def _spec(self) -> AttentionSpec:
        return AttentionSpec(self.mask, self.problem.scale, (BSHD,) * 3)

    def exact(self, *, rounded: bool) -> Gradients:
        """In fp64, from its out and log-sum-exp; if `rounded`, P and dS are rounded before they are multiplied."""
        p, dtype = self.problem, self.problem.q.dtype
        q, do, out = (t.double() for t in (p.q, p.do, self.out))
        k, v = (t.double().repeat_interleave(p.group, 1) for t in (p.k, p.v))
        lse = torch.where(self.lse == -torch.inf, torch.inf, self.lse).double()[..., None]
        probabilities = torch.exp(scores(p, self.whole) - lse)
        of_kept, factor = probabilities * self.kept, self.dropout.rescale
        ds = probabilities * (do @ v.mT * self.kept * factor - (out * do).sum(-1, keepdim=True))
        if rounded:
            of_kept, ds = (t.to(dtype).double() for t in (of_kept, ds))
        dq, dk, dv = ds @ k * p.scale, ds.mT @ q * p.scale, of_kept.mT @ do * factor
        dk, dv = (t.unflatten(1, (-1, p.group)).sum(2) for t in (dk, dv))
        if rounded:
            dq, dk, dv = (t.to(dtype) for t in (dq, dk, dv))
        return dq, dk, dv

    def check(self) -> None:
        """At most twice the error of roundings that cannot be avoided."""
        exact = self.exact(rounded=False)
        got, unavoidable = self(), errors(self.exact(rounded=True), exact)
        p = self.problem
        values = float(p.do.abs().max() * p.v.abs().max()) * self.dropout.rescale
        rounding = 16 * torch.finfo(torch.float32).eps * values * p.q.shape[3]
        for name, a, b in zip(("dq", "dk", "dv"), errors(got, exact), unavoidable, strict=True):
            assert a <= 2 * b + rounding, (
                f"{name}: error {a:.2e}, unavoidable {b:.2e} at {tuple(p.q.shape)} {self.mask}"
            )


def kept_pairs(dropout: Dropout, seed: Tensor, batch: int, heads: int, q_len: int, kv_len: int) -> Tensor:
    """Whether the probabilities of a call are kept: booleans [batch, heads, q_len, kv_len]."""
    rows, keys = (torch.arange(length, device=seed.device) for length in (q_len, kv_len))
    planes = [kept(dropout, seed, b, head, rows, keys) for b, head in itertools.product(range(batch), range(heads))]
    return torch.stack(planes).unflatten(0, (batch, heads))


def problem(
    dims: tuple[int, int], band: Band, q_len: int, kv_len: int, *, batch: int = 2, group: int = 1,
    dtype: torch.dtype = BF16,
) -> Attention:  # fmt: skip
    return Attention.random(
        q_len, kv_len, dims[0], band, batch=batch, kv_heads=2, group=group, dtype=dtype, value_dim=dims[1]
    )


@grid
def test_mask(dims: tuple[int, int], band: Band, schedule: str, group: int, dtype: torch.dtype) -> None:
    """With probabilities of one, and a gradient of one for one query in every column, dV is the mask that was drawn."""
    for seed, probability in zip(SEEDS, (0.1, 0.5, 0.9, 1e-4), strict=True):
        p = problem(dims, band, 300, 300, group=group, dtype=dtype)
        run = Dropped.of(dataclasses.replace(p, q=torch.zeros_like(p.q)), schedule, seed, probability)
        run = dataclasses.replace(run, out=torch.zeros_like(run.out), lse=torch.zeros_like(run.lse))
        expected = torch.where(run.whole & run.kept, run.dropout.rescale, 0.0).to(dtype)
        for first, member in itertools.product(range(0, 300, dims[1]), range(group)):
            end = min(300, first + dims[1])
            do = torch.zeros_like(p.do)
            do[:, member::group, first:end, : end - first] = torch.eye(end - first, device="cuda")
            _, _, dv = dataclasses.replace(run, problem=dataclasses.replace(run.problem, do=do))()
            drawn = dv[..., : end - first].mT
            assert torch.equal(drawn, expected[:, member::group, first:end]), (seed, first, member)


@grid
def test_gradients(dims: tuple[int, int], band: Band, schedule: str, group: int, dtype: torch.dtype) -> None:
    for (q_len, kv_len), seed, probability in zip(LENGTHS, SEEDS, (0.1, 0.5, 0.9, 1e-4), strict=True):
        run = Dropped.of(problem(dims, band, q_len, kv_len, group=group, dtype=dtype), schedule, seed, probability)
        poison()
        run.check()


def test_gradients_beside_keys_and_segments() -> None:
    for q_len, kv_len in LENGTHS[:3]:
        run = Dropped.of(
            problem((128, 128), Band(0), q_len, kv_len, batch=9, group=2), "bent_fold", 7, segment_ids=True
        )
        poison()
        run.check()


@grid
def test_a_threshold_of_zero_has_the_bits_of_no_dropout(
    dims: tuple[int, int], band: Band, schedule: str, group: int, dtype: torch.dtype
) -> None:
    run = Dropped.of(problem(dims, band, 300, 300, group=group, dtype=dtype), schedule, 7)
    for a, b in zip(run.with_probability(1e-9), run.without(), strict=True):
        assert torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("segment_ids", [False, True], ids=["band", "segment_ids"])
def test_repeats(segment_ids: bool) -> None:
    run = Dropped.of(
        problem((128, 128), Band(0), 4200, 1500, batch=9, group=2), "bent_fold", 7, segment_ids=segment_ids
    )
    assert differing_runs(run, 100, load=True) == 0
    assert differing_runs(run, 10, poisoned=True) == 0


def test_another_seed_needs_no_other_kernel_and_is_read_on_the_device() -> None:
    run = Dropped.of(problem((128, 128), Band(0), 300, 300), "bent_fold", 7)
    first = [t.clone() for t in run()]
    run.seed.fill_(8)
    second = run()
    assert not any(map(torch.equal, first, second))
    run.seed.fill_(7)
    assert all(map(torch.equal, first, run()))


def test_seeds_that_cannot_be() -> None:
    run = Dropped.of(problem((128, 128), Band(0), 300, 300), "bent_fold", 7)
    for seed in (run.seed.int(), run.seed.cpu(), run.seed.expand(2)):
        with pytest.raises(ArgumentError, match="dropout"):
            dataclasses.replace(run, seed=seed)()
