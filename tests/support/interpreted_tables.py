"""Run in Triton's interpreter: the tables that the kernels build against `Tables`, word by word, on random masks.

Usage: ``python -m tests.support.interpreted_tables KIND COUNT ...``, with kinds of `KINDS`; prints what was compared.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported

import torch
from dash_inductor.kernels.mask_tables import backward_tables, forward_tables, of_pairs
from dash_inductor.kernels.mask_vectors import Vectors

from dash_inductor.model.mask import Band
from dash_inductor.schedule.table_walk import LEAST, Tables

from .table_words import same_rows, same_tables, vectors
from .tile_pairs import DataMask, of_rule, random_mask, random_pairs


def backward(rng: random.Random, mask: DataMask, block_q: int, block_kv: int) -> None:
    heads, section = rng.randint(1, 5), rng.choice((1, 2, 5, 1000))
    sizes = {"rows": rng.choice((1, 4, 32)), "columns": rng.choice((4, 16, 128))}
    found = backward_tables(vectors(mask, rng), block_q, block_kv, heads, section, **sizes)
    same_tables(found, Tables(mask.pairs(block_q, block_kv), heads, section))


def forward(rng: random.Random, mask: DataMask, block_q: int, block_kv: int) -> None:
    sizes = {"rows": rng.choice((1, 4, 32)), "columns": rng.choice((4, 16, 128))}
    found = forward_tables(vectors(mask, rng), block_q, block_kv, **sizes)
    same_rows(found, Tables(mask.pairs(block_q, block_kv)))


def pairs(rng: random.Random) -> None:
    """Any tile pairs, which no band and vectors make; as many q tiles as the shortest walk that is folded has."""
    n_q, n_kv = rng.choice((rng.randint(1, 12), rng.randint(LEAST - 1, LEAST + 1))), rng.randint(1, 12)
    elements = [random_pairs(rng, n_q, n_kv) for _ in range(rng.randint(1, 4))]
    heads, section = rng.randint(1, 5), rng.choice((1, 2, 5, 1000))
    kinds = torch.tensor(elements, dtype=torch.int8).mT.contiguous()
    same_tables(
        of_pairs(kinds, heads, section, rows=4, columns=rng.choice((2, 4, 16))), Tables(elements, heads, section)
    )


def halves(rng: random.Random) -> None:
    """Walks of half the longest one, more or less: where a kv tile begins to be long."""
    n_q, n_kv = rng.randint(LEAST - 1, LEAST + 2), rng.randint(2, 6)
    ends = [rng.choice((n_q, n_q // 2, n_q // 2 + 1)) for _ in range(n_kv)]
    element = of_rule(n_q, n_kv, lambda q, kv: q < ends[kv])
    kinds = torch.tensor([element], dtype=torch.int8).mT.contiguous()
    same_tables(of_pairs(kinds, 1, 1, rows=8, columns=64), Tables([element]))


def ids(rng: random.Random) -> None:
    """One id for all queries and one for all keys, equal or not, except for one token: what decides without a look."""
    q_len, kv_len = rng.randint(1, 12), 8
    q, kv = ([rng.randrange(2)] * length for length in (q_len, kv_len))
    if rng.random() < 0.7:
        vector = rng.choice((q, kv))
        vector[rng.randrange(len(vector))] = rng.randrange(-1, 3)
    mask = DataMask(Band(), q_len, kv_len, None, ([q], [kv]))
    same_tables(backward_tables(vectors(mask, rng), 4, 8, 1, 1, rows=1, columns=4), Tables(mask.pairs(4, 8)))


def small(rng: random.Random) -> None:
    backward(rng, random_mask(rng, 40), rng.choice((1, 2, 4)), rng.choice((1, 4, 8)))


def folded(rng: random.Random) -> None:
    """Enough q tiles that kv tiles are long, and walks bend."""
    while True:
        mask, block_q, block_kv = random_mask(rng, 90, batch=2), rng.choice((1, 2)), rng.choice((4, 8))
        if any(0 in fold.phase and any(map(bends, fold.walk)) for fold in Tables(mask.pairs(block_q, block_kv)).folds):
            return backward(rng, mask, block_q, block_kv)


def bends(walk: Sequence[int]) -> bool:
    """Whether a walk goes both up and down."""
    return sorted(walk) != list(walk) != sorted(walk, reverse=True)


def wide(rng: random.Random) -> None:
    """Tiles of the real shape, so that the ids of a block decide where they can."""
    backward(rng, random_mask(rng, 2000, batch=1), 64, 128)


def rows(rng: random.Random) -> None:
    forward(rng, random_mask(rng, 60), rng.choice((1, 4)), rng.choice((1, 4, 8)))


def alone(rng: random.Random) -> None:
    """A batch element alone has the words that it has in a batch."""
    mask = random_mask(rng, 40)
    packed = backward_tables(vectors(mask, rng), 2, 4, 2, 3)
    for b in range(mask.batch):
        single = backward_tables(vectors(mask.only(b), rng), 2, 4, 1, 1)
        used = int(single.visits.sum())
        for name in ("base", "visits", "contributions"):
            assert getattr(packed, name)[b].tolist() == getattr(single, name)[0].tolist(), name
        assert packed.steps[b, :used].tolist() == single.steps[0, :used].tolist(), "steps"


def extreme(rng: random.Random) -> None:
    """Ids at the ends of 64 bits, beyond every number that stands for no id."""
    ids = [-(2**63), -(2**62) - 1, 2**62 + 1, 2**63 - 1, 0]
    q, kv = ([rng.choice(ids) for _ in range(rng.choice((1, 30)))] for _ in range(2))
    mask = DataMask(Band(), len(q), len(kv), None, ([q], [kv]))
    segments = torch.tensor([q]), torch.tensor([kv])
    found = backward_tables(Vectors(mask.band, mask.q_len, mask.kv_len, None, segments), 4, 8, 1, 1)
    same_tables(found, Tables(mask.pairs(4, 8)))


def altered(rng: random.Random) -> None:
    """Negative control: one key less is noticed."""
    mask = random_mask(rng, 40, valid=True)
    changed = replace(mask, band=Band(), segments=None, valid=[[True] * mask.kv_len for _ in range(mask.batch)])
    found = backward_tables(vectors(changed, rng), 2, 4, 1, 1)
    same_tables(found, Tables(changed.pairs(2, 4)))
    assert changed.valid is not None
    changed.valid[-1][rng.randrange(mask.kv_len)] = False
    try:
        same_tables(found, Tables(changed.pairs(2, 4)))
    except AssertionError:
        return
    raise AssertionError("tables of another mask pass")


KINDS = {
    "pairs": pairs,
    "halves": halves,
    "ids": ids,
    "small": small,
    "folded": folded,
    "wide": wide,
    "rows": rows,
    "alone": alone,
    "extreme": extreme,
    "altered": altered,
}


def compare(kind: str, count: int) -> str:
    for seed in range(count):
        try:
            KINDS[kind](random.Random(f"{kind} {seed}"))
        except AssertionError as error:
            return f"seed {seed}: {error}"
    return f"compared {count}"


if __name__ == "__main__":
    for kind, count in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        print("RESULT", kind, compare(kind, int(count)), flush=True)
