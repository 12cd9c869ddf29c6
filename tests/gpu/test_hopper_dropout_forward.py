"""Dropout in the Hopper forward, on a GPU: what is kept, pair by pair, values against fp64, and bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.forward import compile_all
from dash_inductor.kernels.hopper.forward import build
from dash_inductor.kernels.hopper.forward.data import ForwardData
from dash_inductor.model import Band, Dropout, Operand

from ..support import forward_tables, hopper_calls
from ..support.attention import Attention
from ..support.calls import forward_spec_of, traits_of
from ..support.dropout import dense, kept_pairs
from ..support.hopper import MARKS
from ..support.hopper_forward import Forward, check_distance
from ..support.processes import once_in_this_run
from ..support.repeats import bits, differing_runs, poison

pytestmark = MARKS

FULL, CAUSAL = Band(), Band(0, None, "bottom_right")
DTYPES = {(64, 64): torch.float16, (128, 128): torch.bfloat16, (192, 128): torch.float16, (256, 256): torch.bfloat16}
NAMES: dict[torch.dtype, Any] = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
VARIANTS = [(FULL, False), (CAUSAL, False), (CAUSAL, True)]
"""Bands, and whether there are segment ids; all with ragged lengths."""
all_configs = pytest.mark.parametrize("dims", build.FORWARD_CONFIGS, ids=str)
variants = pytest.mark.parametrize(("band", "segment_ids"), VARIANTS, ids=str)
SEEDS = 0, 42, -1, 0x0123456789ABCDEF


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Kernels are compiled several at a time."""
    kernels = [
        build.Specialisation(NAMES[DTYPES[dims]], *dims, traits_of(band, segment_ids, dropout=dropout), False)
        for dims in build.FORWARD_CONFIGS
        for band, segment_ids in VARIANTS
        for dropout in (False, True)
    ]
    once_in_this_run("hopper_dropout_forward", lambda: compile_all(kernels))


@dataclasses.dataclass(frozen=True)
class Problem:
    """Attention with dropout; `visible` says who sees whom, [batch, 1, q_len, kv_len]."""

    plain: Attention
    dropout: Dropout
    seed: Tensor
    data: ForwardData | None
    visible: Tensor

    @staticmethod
    def of(
        dims: tuple[int, int], band: Band, segment_ids: bool, p: float = 0.1, seed: int = 42, q_len: int = 300,
        kv_len: int = 421, batch: int = 3, group: int = 2,
    ) -> Problem:  # fmt: skip
        plain = Attention.random(
            q_len, kv_len, dims[0], band, batch=batch, kv_heads=2, group=group, dtype=DTYPES[dims], value_dim=dims[1]
        )
        visible, data = plain.keep()[None, None], None
        if segment_ids:  # two documents, and a padded end that differs
            q_segment_ids, kv_segment_ids = (
                (torch.arange(n) > 150).int().expand(batch, -1).contiguous() for n in (q_len, kv_len)
            )
            for b in range(batch):
                kv_segment_ids[b, kv_len - 1 - 40 * b :] = -1
            found = q_segment_ids.cuda(), kv_segment_ids.cuda()
            visible = forward_tables.seen(*found, plain.keep())[:, None]
            rows, keys = visible.any(3)[..., None], visible.any(2)[..., None]
            plain = dataclasses.replace(plain, q=plain.q * rows, k=plain.k * keys, v=plain.v * keys)
            s = build.FORWARD_CONFIGS[dims]
            data = forward_tables.of_segment_ids(*found, plain.keep(), band.lo is not None, s.consumers, s.block_kv)
        return Problem(plain, Dropout(p, Operand(9)), torch.tensor([seed], device="cuda"), data, visible)

    def run(self, **how: Any) -> Forward:
        p = self.plain
        dropout = how.pop("dropout", self.dropout)
        spec = forward_spec_of(p.mask, p.scale, self.data)
        spec = dataclasses.replace(spec, dropout=dropout, logsumexp=how.pop("logsumexp", False))
        how |= {} if dropout is None else {"dropout": self.seed}
        return hopper_calls.forward(p.q, p.k, p.v, spec, self.data, **how)

    def kept(self) -> Tensor:
        p = self.plain
        return kept_pairs(self.dropout, self.seed, *p.q.shape[:3], p.k.shape[2])

    def check(self, found: Forward) -> None:
        """Against fp64, and against what rounds probabilities and results as any flash forward does."""
        (out, lse), p, kept = found, self.plain, self.kept()
        exact_out, exact_lse = dense(
            p.q.double(), p.k.double(), p.v.double(), self.visible, kept, self.dropout, p.scale
        )
        assert torch.equal(lse.isfinite(), exact_lse.isfinite())
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)
        assert (out[~exact_lse.isfinite()] == 0).all()
        k, v = (t.float().repeat_interleave(p.group, 1) for t in (p.k, p.v))
        s = (p.q.float() @ k.mT * p.scale).masked_fill(~self.visible, -torch.inf)
        top = s.amax(-1, keepdim=True)
        weights = torch.where(self.visible, (s - torch.where(top.isfinite(), top, 0.0)).exp(), 0.0)
        total = weights.sum(-1, keepdim=True)
        share = torch.where(total == 0, 0.0, self.dropout.rescale / total)
        theirs = ((weights.to(p.q.dtype).float() * kept) @ v * share).to(p.q.dtype)
        check_distance(out, theirs, exact_out, False, f"{tuple(p.q.shape)}, {tuple(p.k.shape)}, {p.mask}")


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


@all_configs
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_what_is_kept(dims: tuple[int, int], p: float) -> None:
    """Every pair of every head: scores are equal, and values pick out one key for each column of out."""
    for seed in SEEDS:
        x = Problem.of(dims, FULL, False, p, seed, batch=2)
        kept, a = x.kept(), x.plain
        kv_len, columns = a.k.shape[2], dims[1]
        for first in range(0, kv_len, columns):
            v = torch.zeros_like(a.v)
            for column in range(min(columns, kv_len - first)):
                v[:, :, first + column, column] = 1
            part = dataclasses.replace(x, plain=dataclasses.replace(a, q=torch.zeros_like(a.q), v=v))
            found = part.run()[0][..., : kv_len - first] != 0
            assert torch.equal(found, kept[..., first : first + columns]), (seed, first)


@all_configs
@variants
def test_values(dims: tuple[int, int], band: Band, segment_ids: bool) -> None:
    for p, (q_len, kv_len), group in (
        (0.1, (300, 421), 2), (0.7, (113, 700), 1), (1 - 2.0**-16, (200, 100), 4), (0.1, (1, 65), 1)
    ):  # fmt: skip
        x = Problem.of(dims, band, segment_ids, p, -5, q_len, kv_len, group=group)
        poison()
        x.check(x.run())


@all_configs
@variants
def test_a_threshold_of_zero_changes_no_bit(dims: tuple[int, int], band: Band, segment_ids: bool) -> None:
    """Of a forward whose sums are those of P in fp32, as with dropout; see Note [Sums] in `forward.device.sums`."""
    x = Problem.of(dims, band, segment_ids)
    without = x.run(dropout=None, logsumexp=True)
    assert same(without, x.run(dropout=Dropout(1e-9, Operand(9))))
    assert not same(without, x.run())


@all_configs
@variants
def test_repeats_under_load(dims: tuple[int, int], band: Band, segment_ids: bool) -> None:
    x = Problem.of(dims, band, segment_ids, q_len=1000, kv_len=1100, batch=2)
    assert differing_runs(x.run, 100, load=True) == 0
    assert differing_runs(x.run, 20, poisoned=True) == 0


@all_configs
@variants
def test_bits_belong_to_the_place_of_a_head(dims: tuple[int, int], band: Band, segment_ids: bool) -> None:
    """Any number of CTAs; fewer batch elements after it; another seed, and in its place another batch element."""
    x = Problem.of(dims, band, segment_ids)
    whole = x.run()
    for ctas in (1, 7, 131):
        assert same(whole, x.run(ctas=ctas)), ctas
    cut = [t[:2].contiguous() for t in (x.plain.q, x.plain.k, x.plain.v)]
    plain = dataclasses.replace(x.plain, q=cut[0], k=cut[1], v=cut[2])
    data = None if x.data is None else ForwardData(*(None if t is None else t[:2].contiguous() for t in x.data))  # type: ignore[arg-type]
    assert same([t[:2] for t in whole], dataclasses.replace(x, plain=plain, data=data).run())
    for seed in (43, 42 + (1 << 32)):
        assert not torch.equal(whole[0], dataclasses.replace(x, seed=torch.tensor([seed], device="cuda")).run()[0])


def test_a_graph_reads_the_seed_of_its_replay() -> None:
    x = Problem.of((128, 128), CAUSAL, False)
    expected = []
    for seed in (1, 2):
        x.seed.fill_(seed)
        expected.append([t.clone() for t in x.run()])
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = x.run()
    for i in (1, 0, 1):
        x.seed.fill_(i + 1)
        graph.replay()
        assert same(expected[i], captured)
