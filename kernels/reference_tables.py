"""The tables of `mask_tables` in plain torch, from `table_walk.Tables`: the CPU's implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from ..schedule.table_walk import Tables, entry, longest_first
from ..schedule.visibility import EMPTY, FULL, PARTIAL
from ..schedule.walk import Problem
from .mask_vectors import BackwardTables, ForwardTables, Vectors
from .reference import visible


def tile_pairs(mask: Vectors, block_q: int, block_kv: int) -> list[list[list[int]]]:
    """The tile pairs of each batch element, as `visibility.tile_pairs` defines them, kv tile by kv tile."""
    problem = Problem(mask.band, mask.q_len, mask.kv_len, block_q, block_kv)
    rows = torch.arange(mask.q_len, device=mask.device)
    tiles = rows // block_q
    found = torch.zeros(mask.batch, problem.n_q, problem.n_kv, dtype=torch.int64)
    for kv in range(problem.n_kv):
        keys = slice(kv * block_kv, min((kv + 1) * block_kv, mask.kv_len))
        keep = visible(problem.resolved.band, rows, torch.arange(keys.start, keys.stop, device=mask.device))[None]
        if mask.valid is not None:
            keep = keep & (mask.valid[:, None, keys] != 0)
        if mask.segments is not None:
            q_ids, kv_ids = mask.segments
            keep = keep & (q_ids[:, :, None] == kv_ids[:, None, keys])
        keep = keep.expand(mask.batch, -1, -1)
        seen, hidden = (_per_tile(hits, tiles, problem.n_q) for hits in (keep.any(2), ~keep.all(2)))
        whole = FULL if keys.stop - keys.start == block_kv else PARTIAL
        found[:, :, kv] = torch.where(seen, torch.where(hidden, PARTIAL, whole), EMPTY).cpu()
    pairs: list[list[list[int]]] = found.tolist()
    return pairs


def _per_tile(hits: Tensor, tiles: Tensor, n_q: int) -> Tensor:
    """Whether any of a tile's rows is hit: booleans [batch, n_q] from [batch, q_len]."""
    counts = torch.zeros(len(hits), n_q, dtype=torch.int64, device=hits.device)
    return counts.index_add_(1, tiles, hits.to(torch.int64)) > 0


def backward_tables(mask: Vectors, block_q: int, block_kv: int, heads: int, section: int) -> BackwardTables:
    """As `mask_tables.backward_tables`; words that no walk uses are zero."""
    walk = Tables(tile_pairs(mask, block_q, block_kv), heads, section)
    entries = [[walk.entries(b * heads, kv) for kv in range(walk.n_kv)] for b in range(mask.batch)]
    visits = torch.tensor([[len(words) for words in element] for element in entries], dtype=torch.int32)
    steps = torch.zeros(mask.batch, walk.n_q * walk.n_kv, dtype=torch.int32)
    for b, element in enumerate(entries):
        words = [word for walked in element for word in walked]
        steps[b, : len(words)] = torch.tensor(words, dtype=torch.int32)
    contributions = [[walk.contributions(b * heads, q) for q in range(walk.n_q)] for b in range(mask.batch)]
    tickets = [(b * heads + head) * walk.n_kv + kv for b, head, kv in walk.order]
    base = (visits.cumsum(1) - visits).to(torch.int32)
    found = (
        base,
        visits,
        steps,
        torch.tensor(contributions, dtype=torch.int32),
        torch.tensor(tickets, dtype=torch.int32),
    )
    return BackwardTables(*(tensor.to(mask.device) for tensor in found))


def forward_tables(mask: Vectors, block_q: int, block_kv: int) -> ForwardTables:
    """As `mask_tables.forward_tables`; words that no walk uses are zero."""
    pairs = tile_pairs(mask, block_q, block_kv)
    n_q, n_kv = len(pairs[0]), len(pairs[0][0])
    visits = torch.zeros(mask.batch, n_q, dtype=torch.int32)
    steps = torch.zeros(mask.batch, n_q * n_kv, dtype=torch.int32)
    for b, element in enumerate(pairs):
        for q, row in enumerate(element):
            words = [entry(kv, 0, kind == PARTIAL) for kv, kind in enumerate(row) if kind != EMPTY]
            visits[b, q] = len(words)
            steps[b, q * n_kv : q * n_kv + len(words)] = torch.tensor(words, dtype=torch.int32)
    order = torch.tensor([longest_first(lengths) for lengths in visits.tolist()], dtype=torch.int32)
    return ForwardTables(*(tensor.to(mask.device) for tensor in (visits, steps, order)))
