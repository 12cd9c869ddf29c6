"""Masks that are data as tensors, and what is built from them against `Tables`, word by word."""

from __future__ import annotations

import random
from itertools import pairwise

import torch
from dash_inductor.kernels.mask_vectors import BackwardTables, ForwardTables, Vectors

from dash_inductor.schedule.table_walk import Tables, entry
from dash_inductor.schedule.visibility import PARTIAL

from .tile_pairs import DataMask


def vectors(mask: DataMask, rng: random.Random, device: str = "cpu") -> Vectors:
    """The mask's vectors as tensors, of any dtype that holds them and any strides."""

    def tensor(rows: list[list[int]] | list[list[bool]], dtypes: list[torch.dtype]) -> torch.Tensor:
        dense = torch.tensor(rows, dtype=rng.choice(dtypes), device=device)
        how = rng.randrange(3)
        if how == 1:
            return dense.T.contiguous().T
        if how == 2:
            wide = torch.ones(len(rows), 2 * dense.shape[1] + 3, dtype=dense.dtype, device=device)
            wide[:, 1 : 2 * dense.shape[1] : 2] = dense
            return wide[:, 1 : 2 * dense.shape[1] : 2]
        return dense

    valid = None if mask.valid is None else tensor(mask.valid, [torch.bool, torch.uint8])
    ids = [torch.int32, torch.int64]
    segments = None if mask.segments is None else (tensor(mask.segments[0], ids), tensor(mask.segments[1], ids))
    return Vectors(mask.band, mask.q_len, mask.kv_len, valid, segments)


def same_tables(found: BackwardTables, walk: Tables) -> None:
    """Every word that a kernel may read."""
    tickets = [(b * walk.heads + head) * walk.n_kv + kv for b, head, kv in walk.order]
    assert found.tickets.tolist() == tickets, "tickets"
    for b in range(len(walk.pairs)):
        head = b * walk.heads
        entries = [walk.entries(head, kv) for kv in range(walk.n_kv)]
        assert found.visits[b].tolist() == [len(words) for words in entries], "visits"
        assert found.base[b].tolist() == [sum(map(len, entries[:kv])) for kv in range(walk.n_kv)], "base"
        words = [word for walked in entries for word in walked]
        assert found.steps[b, : len(words)].tolist() == words, "steps"
        counts = [walk.contributions(head, q) for q in range(walk.n_q)]
        assert found.contributions[b].tolist() == counts, "contributions"


def same_rows(found: ForwardTables, walk: Tables) -> None:
    """Every word that a kernel may read; `walk` has one head."""
    for b, pairs in enumerate(walk.pairs):
        order = found.order[b].tolist()
        assert sorted(order) == list(range(walk.n_q)), "order"
        counts = [walk.contributions(b, q) for q in order]
        assert all(m > n or (m == n and q < p) for (m, q), (n, p) in pairwise(zip(counts, order, strict=True))), "order"
        for q in range(walk.n_q):
            words = [entry(kv, 0, pairs[q][kv] == PARTIAL) for kv in walk.visible(b, q)]
            assert found.visits[b, q] == len(words), "visits"
            assert found.steps[b, q * walk.n_kv :][: len(words)].tolist() == words, "steps"
