"""The random bits of dropout, and the reference executor with them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dash_inductor.errors import ArgumentError
from dash_inductor.kernels.reference import backward as reference
from dash_inductor.kernels.reference import forward as reference_forward
from dash_inductor.kernels.reference.dropout import kept, philox, random_bits, ranks
from dash_inductor.model import AttentionSpec, Band, Dropout, Keys, Mask, Operand, Plan, Segments, Tiles
from dash_inductor.operators import attention as ops

from ...support.attention import Attention
from ...support.calls import BSHD
from ...support.dropout import exact, kept_pairs

SEED = torch.tensor([0x0123456789ABCDEF])
TENTH = Dropout(0.1, Operand(0))


@pytest.mark.parametrize(
    ("rounds", "counter", "key", "words"),
    [
        (7, (0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (7, (0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            7,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
        (10, (0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (10, (0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            10,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_words_that_its_authors_publish(
    rounds: int, counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    c0, c1, c2, c3, k0, k1 = (torch.tensor([x]) for x in (*counter, *key))
    assert tuple(int(word) for word in philox((c0, c1, c2, c3), (k0, k1), rounds)) == words


@pytest.mark.parametrize("threshold", [1, 2, 6554, 0x7F80, 0x7F82, 0x8000, 0x8001, 0x807E, 0x8080, 0xFFFE, 0xFFFF])
def test_so_many_sets_of_bits_drop_a_probability(threshold: int) -> None:
    """As bfloat16 numbers below a bound, or not below one; the same as by their ranks."""
    dropout, numbers = Dropout(threshold / 65536, Operand(0)), torch.arange(65536)
    assert dropout.threshold == threshold
    floats = numbers.to(torch.int16).view(torch.bfloat16)
    count = min(threshold, 65536 - threshold)
    below = ranks(numbers) < count
    assert below.sum() == count
    assert not floats[below].isnan().any()
    assert (floats[below].max() < floats[~below & ~floats.isnan()]).all()


def test_ranks_are_those_of_numbers() -> None:
    numbers = torch.arange(65536)
    assert torch.equal(ranks(numbers).sort().values, numbers)
    floats = numbers[ranks(numbers).argsort()].to(torch.int16).view(torch.bfloat16)
    assert not floats[:0xFF02].isnan().any()
    assert floats[0xFF02:].isnan().all()
    assert (floats[1:0xFF02] >= floats[:0xFF01]).all()
    assert (floats[1:0xFF02] == floats[:0xFF01]).nonzero().tolist() == [[0x7F80]]  # the zeros


@pytest.mark.parametrize("count", [0x7F81, 0x807F])
def test_no_bound_is_between_zeros(count: int) -> None:
    assert abs(Dropout(count / 65536, Operand(0)).threshold - count) == 1


def test_no_two_pairs_share_their_bits() -> None:
    """The blocks of a plane, of two heads and of two batch elements have different counters, and all words are used."""
    places = torch.arange(32)
    found = torch.stack([random_bits(SEED, b, head, places, places) for b in (0, 1) for head in (0, 1)])
    for word in (found[:, 0::2, 0::2], found):
        values = word.flatten()
        pairs = len(values) * (len(values) - 1) / 2
        equal = (values[:, None] == values[None, :]).triu(1).sum()
        assert abs(float(equal) - pairs / 65536) < 6 * math.sqrt(pairs / 65536)


def test_the_bits_of_a_pair_follow_from_its_place_alone() -> None:
    rows, keys = torch.arange(77), torch.arange(50)
    whole = kept(TENTH, SEED, 1, 2, rows, keys)
    for first_row, first_key in ((0, 0), (16, 32), (13, 7), (70, 49)):
        part = kept(TENTH, SEED, 1, 2, rows[first_row:], keys[first_key:])
        assert torch.equal(part, whole[first_row:, first_key:])


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 2.0**-6])
def test_so_many_are_kept_everywhere(seed: int, p: float) -> None:
    """In all, in every row, and in every column."""
    dropout, length = Dropout(p, Operand(0)), 1024
    found = (~kept(dropout, torch.tensor([seed]), 0, 0, torch.arange(length), torch.arange(length))).double()
    for sums, count in ((found.sum()[None], length**2), (found.sum(0), length), (found.sum(1), length)):
        deviation = (sums - count * p).abs().max() / math.sqrt(count * p * (1 - p))
        assert deviation < 6.5


def correlation(x: Tensor, y: Tensor) -> float:
    """In standard deviations of what independent ones have."""
    x, y = x.double() - x.double().mean(), y.double() - y.double().mean()
    return float((x * y).mean() / (x.std() * y.std())) * math.sqrt(x.numel())


def test_neighbours_are_independent() -> None:
    """Neighbours in the plane, other heads, other batch elements and other seeds, near and far ones."""
    places = torch.arange(512)
    half = Dropout(0.5, Operand(0))
    here = kept(half, SEED, 0, 0, places, places)
    for down, right in ((0, 1), (1, 0), (1, 1), (8, 0), (0, 8), (8, 8), (0, 2), (0, 16), (16, 0), (7, 9), (9, 7)):
        moved = kept(half, SEED, 0, 0, places + down, places + right)
        assert abs(correlation(here, moved)) < 5, (down, right)
    others = [(SEED, 0, 1), (SEED, 1, 0), (SEED, 1, 1), (SEED + 1, 0, 0), (SEED ^ (1 << 40), 0, 0), (SEED, 0, 2**16)]
    for seed, b, head in others:
        assert abs(correlation(here, kept(half, seed, b, head, places, places))) < 5, (seed, b, head)
    assert abs(correlation(here, here.T)) < 5


def spec_of(mask: Mask, dropout: Dropout | None, results: int, scale: float = 0.3) -> AttentionSpec:
    return AttentionSpec(mask, scale, (BSHD,) * results, dropout=dropout)


PLANS = [
    Plan("reference", "two_pass", "reference", Tiles(16, 32, 1, 1), Tiles(32, 16, 1, 1), 1, False, Tiles(16, 16, 1, 1)),
    Plan("reference", "spt", "reference", Tiles(32, 16, 1, 1), None, 1, False, Tiles(64, 32, 1, 1)),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.schedule)
@pytest.mark.parametrize("p", [0.1, 0.75, 1 - 2.0**-7])
@pytest.mark.parametrize("data", ["", "keys", "segments"])
def test_gradients_are_those_of_what_was_kept(plan: Plan, p: float, data: str) -> None:
    problem = Attention.random(45, 70, 16, Band(0), group=2, dtype=torch.float32, device="cpu")
    extras, visible = [], problem.keep().expand(2, 4, -1, -1)
    keys = segments = None
    if data == "keys":
        extras = [torch.rand(2, 70, generator=torch.Generator().manual_seed(5)) < 0.7]
        keys, visible = Keys(Operand(0)), visible & extras[0][:, None, None, :]
    if data == "segments":
        extras = [torch.arange(45).expand(2, -1) // 20, torch.arange(70).expand(2, -1) // 20]
        segments = Segments(Operand(0), Operand(1))
        visible = visible & (extras[0][:, None, :, None] == extras[1][:, None, None, :])
    mask, dropout = Mask(problem.mask, keys, segments), Dropout(p, Operand(len(extras)))
    operands = [*extras, SEED]
    assert plan.forward_tiles is not None
    scale = problem.scale
    out, lse = reference_forward.forward(
        problem.q, problem.k, problem.v, operands, spec_of(mask, dropout, 1, scale), plan.forward_tiles
    )
    found = reference.backward(
        problem.do, problem.q, problem.k, problem.v, out, lse, operands, spec_of(mask, dropout, 3, scale), plan
    )
    pairs = kept_pairs(dropout, SEED, 2, 4, 45, 70)
    wanted = exact((problem.q, problem.k, problem.v), problem.do, visible, pairs, dropout, scale)
    assert (out - wanted[0]).abs().max() < 1e-5 * wanted[0].abs().max()
    sees = wanted[1].isfinite()
    assert (lse - wanted[1])[sees].abs().max() < 1e-5
    for ours, true in zip(found, wanted[2], strict=True):
        assert (ours - true).abs().max() < 2e-5 * true.abs().max()


def test_tiles_and_schedules_do_not_change_what_is_kept() -> None:
    """With v of ones the output is the sum of the kept probabilities, equal but for the rounding of sums."""
    problem = Attention.random(40, 40, 16, Band(), dtype=torch.float32, device="cpu")
    ones = torch.ones_like(problem.v)
    outs = [
        reference_forward.forward(problem.q, problem.k, ones, [SEED], spec_of(Mask(), TENTH, 1), tiles)[0]
        for tiles in (Tiles(16, 16, 1, 1), Tiles(64, 64, 1, 1), Tiles(16, 64, 1, 1))
    ]
    for out in outs[1:]:
        assert torch.allclose(out, outs[0], atol=1e-6)
    assert outs[0].std() > 1e-3


@pytest.mark.parametrize("p", [2.0**-20, 2.0**-18])
def test_a_probability_that_rounds_to_zero_drops_nothing(p: float) -> None:
    """The bits are the same as without dropout."""
    problem = Attention.random(40, 40, 16, Band(0), dtype=torch.float32, device="cpu")
    results = []
    for dropout in (None, Dropout(p, Operand(0))):
        tensors = problem.q, problem.k, problem.v
        out, lse = reference_forward.forward(*tensors, [SEED], spec_of(Mask(), dropout, 1), Tiles(32, 32, 1, 1))
        gradients = reference.backward(problem.do, *tensors, out, lse, [SEED], spec_of(Mask(), dropout, 3), PLANS[0])
        results.append([out, lse, *gradients])
    assert all(map(torch.equal, *results))


def test_the_bits_of_a_batch_element_and_head_follow_from_their_numbers() -> None:
    """A larger batch, or more heads behind it, changes none; another place in the batch does."""
    problem = Attention.random(33, 40, 16, Band(0), batch=3, kv_heads=4, dtype=torch.float32, device="cpu")

    def run(elements: slice, heads: slice) -> list[Tensor]:
        q, k, v, do = (t[elements, heads] for t in (problem.q, problem.k, problem.v, problem.do))
        mask = Mask(problem.mask)
        out, lse = reference_forward.forward(q, k, v, [SEED], spec_of(mask, TENTH, 1), Tiles(32, 32, 1, 1))
        return [out, *reference.backward(do, q, k, v, out, lse, [SEED], spec_of(mask, TENTH, 3), PLANS[0])]

    whole = run(slice(None), slice(None))
    for ours, theirs in zip(run(slice(0, 1), slice(0, 2)), whole, strict=True):
        assert torch.equal(ours, theirs[:1, :2])
    for ours, theirs in zip(run(slice(1, 2), slice(None)), whole, strict=True):
        assert not torch.equal(ours, theirs[1:2])


def test_a_call_without_its_seed_is_refused() -> None:
    q = torch.zeros(1, 1, 8, 16)
    with pytest.raises(ArgumentError, match="reads number 1"):
        ops.attention_forward(q, q, q, [SEED], str(spec_of(Mask(), Dropout(0.1, Operand(1)), 1)), str(PLANS[0]), "x")


def test_a_seed_is_what_was_drawn_in_memory_of_its_own() -> None:
    drawn = torch.tensor(-(2**62) - 1)
    seed = ops.dropout_seed(drawn, "x")
    drawn.zero_()
    assert (seed.dtype, seed.shape, seed.tolist()) == (torch.int64, (1,), [-(2**62) - 1])
