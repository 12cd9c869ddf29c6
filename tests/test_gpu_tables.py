"""The kernels that build tables from a mask's vectors, on a GPU: the words of `Tables`, every time."""

from __future__ import annotations

import random

import pytest
import torch
from dash_inductor.kernels.mask_tables import backward_tables, forward_tables
from dash_inductor.kernels.mask_vectors import Vectors

from dash_inductor.model.mask import Band
from dash_inductor.schedule.table_walk import Tables
from dash_inductor.schedule.visibility import EMPTY, FULL, PARTIAL

from .support.table_words import same_rows, same_tables, vectors
from .support.tile_pairs import random_mask

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", range(12))
def test_random_masks(seed: int) -> None:
    """Lengths up to 1500 in tiles of 16 x 32, so that kv tiles are folded, and in tiles of the real shapes."""
    rng = random.Random(seed)
    mask = random_mask(rng, rng.choice((200, 1500)), batch=2)
    on_device = vectors(mask, rng, "cuda")
    heads, section = rng.randint(1, 5), rng.choice((1, 2, 5, 1000))
    for block_q, block_kv in ((16, 32), (64, 128), (128, 64)):
        walk = Tables(mask.pairs(block_q, block_kv), heads, section)
        same_tables(backward_tables(on_device, block_q, block_kv, heads, section), walk)
        same_rows(forward_tables(on_device, block_q, block_kv), walk)


def packed(lengths: list[int]) -> tuple[torch.Tensor, list[list[int]]]:
    """Segment ids of causal documents of whole kv tiles of 128 keys, and the tile pairs with q tiles of 64."""
    document = [d for d, length in enumerate(lengths) for _ in range(length // 64)]
    pairs = [
        [
            EMPTY if document[q] != document[2 * kv] or kv > q // 2 else FULL if kv < q // 2 else PARTIAL
            for kv in range(len(document) // 2)
        ]
        for q in range(len(document))
    ]
    return torch.tensor(document, dtype=torch.int32, device="cuda").repeat_interleave(64), pairs


def test_long_packed_documents() -> None:
    """32768 tokens: walks of hundreds of steps, and every phase of the builder loops over several blocks."""
    rng = random.Random(0)
    shapes = [[32768], [16384, *[1024] * 16], [128 * n for n in (100, 1, 1, 30, 60, 2, 62)]]
    elements = [packed(rng.sample(lengths, len(lengths))) for lengths in shapes]
    ids = torch.stack([ids for ids, _ in elements])
    mask = Vectors(Band(0), 32768, 32768, None, (ids, ids))
    same_tables(backward_tables(mask, 64, 128, 4, 3), Tables([pairs for _, pairs in elements], 4, 3))


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_same_words_every_time(deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    generator = torch.Generator("cuda").manual_seed(0)
    ids = torch.randint(0, 40, (8, 4000), generator=generator, device="cuda").sort(1).values
    valid = torch.rand(8, 4000, generator=generator, device="cuda") < 0.999
    mask = Vectors(Band(0), 4000, 4000, valid, (ids, ids))
    first = backward_tables(mask, 64, 128, 16, 8)
    used = torch.arange(first.steps.shape[1], device="cuda") < first.visits.sum(1, keepdim=True)
    for _ in range(50):
        again = backward_tables(mask, 64, 128, 16, 8)
        for name, a, b in zip(first._fields, first, again, strict=True):
            assert torch.equal(a[used], b[used]) if name == "steps" else torch.equal(a, b), name
