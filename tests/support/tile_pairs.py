"""Tile pairs of batch elements: random masks that are data, and large ones built without looking at elements."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dash_inductor.model.mask import Band
from dash_inductor.schedule.visibility import EMPTY, FULL, PARTIAL, sees, tile_pairs

BANDS = (
    Band(),
    Band(0),
    Band(0, None, "bottom_right"),
    Band(0, 9),
    Band(-3, 7, "bottom_right"),
    Band(None, 5),
    Band(30, 60),
    Band(500, 600),
)


@dataclass(frozen=True)
class PairMask:
    """A band and vectors, one of each per batch element, as the kernels get them."""

    band: Band
    q_len: int
    kv_len: int
    valid: list[list[bool]] | None
    segments: tuple[list[list[int]], list[list[int]]] | None

    @property
    def batch(self) -> int:
        return len(self.valid or (self.segments or ([[]], []))[0])

    def pairs(self, block_q: int, block_kv: int) -> list[list[list[int]]]:
        """The tile pairs of each batch element."""
        found = []
        for b in range(self.batch):
            valid = None if self.valid is None else self.valid[b]
            segments = None if self.segments is None else (self.segments[0][b], self.segments[1][b])
            seen = sees(self.band, self.q_len, self.kv_len, valid, segments)
            found.append(tile_pairs(seen, self.q_len, self.kv_len, block_q, block_kv))
        return found

    def only(self, b: int) -> PairMask:
        """The mask of one batch element."""
        valid = None if self.valid is None else [self.valid[b]]
        segments = None if self.segments is None else ([self.segments[0][b]], [self.segments[1][b]])
        return PairMask(self.band, self.q_len, self.kv_len, valid, segments)


def _validity(rng: random.Random, length: int) -> list[bool]:
    """Padding on either side, holes, random keys, no key at all, every key."""
    cut, kind = rng.randint(0, length), rng.randrange(6)
    if kind == 0:
        return [j < cut for j in range(length)]
    if kind == 1:
        return [j >= cut for j in range(length)]
    if kind == 2:
        width = rng.randint(1, max(1, length // 3))
        return [not cut <= j < cut + width for j in range(length)]
    if kind == 3:
        density = rng.choice((0.02, 0.3, 0.9))
        return [rng.random() < density for _ in range(length)]
    return [kind == 4] * length


IDS = (-(2**31), -7, -1, 0, 1, 2, 5, 2**31 - 1)


def _segments(rng: random.Random, q_len: int, kv_len: int) -> tuple[list[int], list[int]]:
    """Packed documents, ids in any order, the same id in several places, ids that one side alone has, nearly one id."""
    kind, length = rng.randrange(7), max(q_len, kv_len)
    if kind == 0:
        borders = rng.sample(range(length), rng.randint(0, min(6, length - 1)))
        number = [sum(border <= i for border in borders) for i in range(length)]
        return number[:q_len], number[:kv_len]
    if kind == 1:
        run = rng.randint(1, 40)
        ids = [rng.choice(IDS) for _ in range(length)]
        return [ids[i // run] for i in range(q_len)], [ids[i // run] for i in range(kv_len)]
    if kind == 2:
        return [rng.choice(IDS) for _ in range(q_len)], [rng.choice(IDS) for _ in range(kv_len)]
    if kind == 3:
        return [rng.choice(IDS[:4]) for _ in range(q_len)], [rng.choice(IDS[4:]) for _ in range(kv_len)]
    q, kv = [IDS[3]] * q_len, [IDS[3]] * kv_len
    if kind > 4:  # all of one id but a few, on one side
        vector = (q, kv)[kind - 5]
        for _ in range(rng.randint(1, 3)):
            vector[rng.randrange(len(vector))] = rng.choice(IDS)
    return q, kv


def random_mask(
    rng: random.Random, max_len: int, *, batch: int = 3, valid: bool | None = None, segments: bool | None = None
) -> PairMask:
    """Any band, equal or unequal lengths, vectors of every kind; at least one of the vectors."""
    q_len, kv_len = rng.randint(1, max_len), rng.randint(1, max_len)
    if rng.random() < 0.5:
        kv_len = q_len
    segments = rng.random() < 0.6 if segments is None else segments
    valid = not segments or rng.random() < 0.6 if valid is None else valid
    ids = [_segments(rng, q_len, kv_len) for _ in range(batch)] if segments else None
    return PairMask(
        rng.choice(BANDS), q_len, kv_len,
        [_validity(rng, kv_len) for _ in range(batch)] if valid else None,
        None if ids is None else ([q for q, _ in ids], [kv for _, kv in ids]),
    )  # fmt: skip


def of_rule(n_q: int, n_kv: int, visible: Callable[[int, int], bool]) -> list[list[int]]:
    """Tile pairs that are full wherever they are visible."""
    return [[FULL if visible(q, kv) else EMPTY for kv in range(n_kv)] for q in range(n_q)]


def random_pairs(rng: random.Random, n_q: int, n_kv: int) -> list[list[int]]:
    """Any tile pairs: of any density, or denser in some rows and columns; some of them empty throughout."""
    density = rng.choice((0.0, 0.03, 0.2, 0.5, 0.9, 1.0, 1.0))
    rows, columns = ([rng.choice((0.0, 0.3, 1.0, 1.0)) for _ in range(n)] for n in (n_q, n_kv))
    even = rng.random() < 0.5
    return [
        [
            rng.choice((PARTIAL, FULL)) if rng.random() < density * (1.0 if even else rows[q] * columns[kv]) else EMPTY
            for kv in range(n_kv)
        ]
        for q in range(n_q)
    ]


def documents(rng: random.Random, lengths: Sequence[int], block_q: int, block_kv: int) -> list[list[int]]:
    """Causal documents whose tiles are cut at their starts; `lengths` in tokens."""
    n_q, n_kv = (sum(-(-length // block) for length in lengths) for block in (block_q, block_kv))
    pairs, q0, kv0 = [[EMPTY] * n_kv for _ in range(n_q)], 0, 0
    for length in lengths:
        for q in range(-(-length // block_q)):
            for kv in range(min(-(-length // block_kv), ((q + 1) * block_q - 1) // block_kv + 1)):
                pairs[q0 + q][kv0 + kv] = FULL
        q0, kv0 = q0 - (-length // block_q), kv0 - (-length // block_kv)
    return pairs
