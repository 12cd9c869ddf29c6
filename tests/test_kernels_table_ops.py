"""The operators `dash::mask_tables` and `dash::mask_rows`: the CPU against the definition, fakes, errors."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest
import sympy
import torch
from dash_inductor.kernels import reference_tables
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dash_inductor.errors import ArgumentError
from dash_inductor.model import Band, Call, Keys, Mask, Operand
from dash_inductor.schedule.table_walk import Tables
from dash_inductor.table_ops import mask_rows, mask_tables

from .support.table_words import same_rows, same_tables, vectors
from .support.tile_pairs import DataMask, random_mask


def call(band: Band, operand: int = 0) -> str:
    return str(Call(Mask(band, Keys(Operand(operand))), 0.125, orders=((0, 1, 2, 3),)))


@pytest.mark.parametrize("seed", range(40))
def test_torch_against_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    mask = random_mask(rng, 90)
    block_q, block_kv = rng.choice((1, 2, 16)), rng.choice((1, 4, 32))
    found, pairs = vectors(mask, rng), mask.pairs(block_q, block_kv)
    assert reference_tables.tile_pairs(found, block_q, block_kv) == pairs
    same_tables(reference_tables.backward_tables(found, block_q, block_kv, 3, 2), Tables(pairs, 3, 2))
    same_rows(reference_tables.forward_tables(found, block_q, block_kv), Tables(pairs))


def padded(seed: int) -> tuple[DataMask, list[torch.Tensor]]:
    mask = random_mask(random.Random(seed), 90, valid=True, segments=False)
    return mask, [torch.zeros(3), torch.tensor(mask.valid)]


@pytest.mark.parametrize("seed", range(4))
def test_operators_on_the_cpu(seed: int) -> None:
    mask, extras = padded(seed)
    text = call(mask.band, 1)
    walk = Tables(mask.pairs(4, 8), 2, 3)
    same_tables(
        reference_tables.BackwardTables(*mask_tables(extras, mask.q_len, mask.kv_len, 2, 3, text, "4x8w4s1")), walk
    )
    rows = mask_rows(extras, mask.q_len, mask.kv_len, text, "4x8w4s1")
    same_rows(reference_tables.ForwardTables(*rows), walk if walk.heads == 1 else Tables(mask.pairs(4, 8)))


def test_fakes_have_the_real_shapes() -> None:
    for seed in range(6):
        mask, extras = padded(seed)
        lengths = mask.q_len, mask.kv_len
        real = [
            *mask_tables(extras, *lengths, 5, 1, call(mask.band, 1), "4x8w4s1"),
            *mask_rows(extras, *lengths, call(mask.band, 1), "16x4w4s1"),
        ]
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(t) for t in extras]
            fake = [
                *mask_tables(fakes, *lengths, 5, 1, call(mask.band, 1), "4x8w4s1"),
                *mask_rows(fakes, *lengths, call(mask.band, 1), "16x4w4s1"),
            ]
        facts = [[(t.shape, t.dtype, t.stride(), t.device) for t in tensors] for tensors in (real, fake)]
        assert facts[0] == facts[1]


def test_lengths_may_be_symbolic() -> None:
    """One graph for all batch sizes, and for all lengths of more than one tile, which is PyTorch's own guard."""

    def both(valid: torch.Tensor) -> list[torch.Tensor]:
        length = valid.shape[1]
        text, tiles = call(Band(0)), "4x8w4s1"
        return [
            *mask_tables([valid], length, length, 2, 1, text, tiles),
            *mask_rows([valid], length, length, text, tiles),
        ]

    graph = make_fx(both, tracing_mode="symbolic")(torch.ones(3, 77, dtype=torch.bool))
    assert all(isinstance(guard.expr, sympy.Ne) and guard.expr.rhs == 1 for guard in graph.shape_env.guards)
    assert {node.target for node in graph.graph.nodes} >= {mask_tables, mask_rows}
    for seed in range(3):
        _, (_, valid) = padded(seed)
        for a, b in zip(graph(valid), both(valid), strict=True):
            assert torch.equal(a, b)


VALID = torch.ones(2, 40, dtype=torch.bool)
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: mask_rows([VALID], 40, 40, call(Band(), 1), "4x4w4s1"), "reads number 1"),
    (lambda: mask_rows([VALID], 40, 41, call(Band()), "4x4w4s1"), "valid.shape=(2, 40)"),
    (lambda: mask_rows([VALID], 40, 40, call(Band()), "4x4"), "tiles='4x4'"),
    (
        lambda: mask_tables([VALID], 40, 40, 1, 1, str(Call(Mask(Band(0)), 0.125, orders=((0, 1, 2, 3),))), "4x4w4s1"),
        "mask='causal' is not allowed: expected a band and a vector of valid keys",
    ),
    (lambda: mask_tables([VALID], 40, 40, 0, 1, call(Band()), "4x4w4s1"), "heads=0"),
]


@pytest.mark.parametrize(("run", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_refused(run: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        run()
