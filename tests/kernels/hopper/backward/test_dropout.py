"""The random bits that the Hopper backward draws are the reference's, without a GPU."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from dash_inductor.kernels.reference.dropout import kept
from dash_inductor.model import Operand
from dash_inductor.model.dropout import STEPS, Dropout

from ....support.hopper_dropout import block_layout, gradient, marked

SHAPES = [(128, 64, 128), (128, 64, 64), (128, 32, 64), (64, 64, 64)]
"""Keys and queries of the scores of a piece, rows of a q tile: the shapes of all head dims."""


@dataclass(frozen=True)
class Place:
    """The place of scores, and the other facts that the bits depend on."""

    seed: int = 123
    threshold: int = STEPS // 2
    batch: int = 0
    q_head: int = 0
    q_tile: int = 0
    kv_tile: int = 0
    piece: int = 0


PLACES = [
    Place(),
    *(Place(seed=seed) for seed in (0, -1, 1 << 32, (1 << 63) - 1, -(1 << 63))),
    *(Place(threshold=threshold) for threshold in (0, 1, 6554, STEPS // 2 + 1, STEPS - 1)),
    Place(batch=5),
    Place(q_head=31),
    Place(q_tile=77),
    Place(kv_tile=1023),
    Place(-3, 20000, 7, 3, 5, 9),
]


def expected(place: Place, shape: tuple[int, int, int]) -> torch.Tensor:
    """Whether scores [keys, queries] are kept."""
    keys, queries, block_q = shape
    first = place.q_tile * block_q + place.piece * queries
    rows, columns = torch.arange(first, first + queries), place.kv_tile * keys + torch.arange(keys)
    dropout = Dropout(max(place.threshold, 1) / STEPS, Operand(0))
    if place.threshold == 0:  # no `Dropout` has that
        return torch.ones(keys, queries, dtype=torch.bool)
    assert dropout.threshold == place.threshold
    return kept(dropout, torch.tensor([place.seed]), place.batch, place.q_head, rows, columns).T


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits(shape: tuple[int, int, int]) -> None:
    """P keeps its magnitude, and is negative where it is dropped."""
    keys, queries, block_q = shape
    p = np.random.default_rng(0).random((keys, queries), np.float32) + 0.5
    for place, piece in itertools.product(PLACES, range(block_q // queries)):
        at = replace(place, piece=piece)
        got = marked(p, block_q=block_q, **vars(at))
        assert (np.abs(got) == p).all(), at
        assert ((got > 0) == expected(at, shape).numpy()).all(), at


def test_what_bits_depend_on() -> None:
    """Each of them matters: or the test before would not see that one was left out."""
    shape = SHAPES[0]
    others = [
        Place(seed=124),
        Place(seed=123 + (1 << 32)),
        Place(batch=1),
        Place(q_head=1),
        Place(q_tile=1),
        Place(kv_tile=1),
        Place(piece=1),
    ]
    masks = [expected(place, shape) for place in (Place(), *others)]
    assert not any(a.equal(b) for a, b in itertools.combinations(masks, 2))


def test_gradient_of_scores() -> None:
    """dS = P (keep rescale dP - delta), from P of any size, and from zeros of either sign."""
    rng = np.random.default_rng(0)
    p, dp, delta = (rng.standard_normal((64, 32), np.float32) for _ in range(3))
    p[0] = 0.0
    p[1] = -0.0
    kept_dp = np.where(p > 0, dp * np.float32(1.25), 0)
    assert np.array_equal(gradient(p, dp, delta, 1.25), np.abs(p) * (kept_dp - delta))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_block_is_computed_twice(shape: tuple[int, int, int]) -> None:
    """Every block is computed by some thread, too."""
    keys, queries, _ = shape
    registers, lanes, warps, (rows, columns) = block_layout((keys, queries), 8)
    bases = [*registers, *lanes, *warps]
    assert 1 << len(bases) == rows * columns == keys * queries // 8
    combinations = itertools.product((0, 1), repeat=len(bases))
    places = [
        [sum(bit * base[i] for bit, base in zip(bits, bases, strict=True)) for i in (0, 1)] for bits in combinations
    ]
    assert {(row, column) for row, column in places} == set(itertools.product(range(rows), range(columns)))
