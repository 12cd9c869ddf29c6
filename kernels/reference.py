"""Reference executor: a plan in plain ATen, tile by tile, in the plan's accumulation order.

Slow and obvious on purpose.  It is the CPU path, the eager kernel of `dash::attention_backward`, and the tests' oracle.
Like the kernels it keeps scores and sums in fp32 and rounds p and ds to the input's dtype before they enter a matmul.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..schedule.jobs import Column, Problem, functions, tables
from ..schedule.problem import Band, Plan, Tiles


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: str,
    scale: float,
    plan: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), contiguous and typed like (query, key, value); shapes as in `dash_inductor.ops`."""
    parsed = Plan.parse(plan)
    site = _Site.of(grad_out, query, key, value, out, logsumexp, Band.parse(mask), scale)
    if parsed.dq is not None:
        dq = site.dq_pass(parsed.dq)
        _, dk, dv = site.kv_pass(parsed.schedule, parsed.dkdv, accumulate=False)
    else:
        dq, dk, dv = site.kv_pass(parsed.schedule, parsed.dkdv, accumulate=True)
    return (
        (dq * scale).to(query.dtype).reshape(query.shape),
        (dk * scale).to(key.dtype).reshape(key.shape),
        dv.to(value.dtype).reshape(value.shape),
    )


def logits(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """fp32 scores of [..., m, d] queries against [..., n, d] keys."""
    return (query.float() @ key.float().transpose(-1, -2)) * scale


def visible(band: Band, q_rows: Tensor, kv_rows: Tensor) -> Tensor:
    """Boolean [len(q_rows), len(kv_rows)]; the band is anchored top left."""
    distance = q_rows[:, None] - kv_rows[None, :]
    keep = torch.ones_like(distance, dtype=torch.bool)
    if band.lo is not None:
        keep &= distance >= band.lo
    if band.hi is not None:
        keep &= distance <= band.hi
    return keep


@dataclass(frozen=True)
class _Site:
    """Operands as [batch, kv heads, group, rows, head dim] (keys and values without group), and the mask."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    lse: Tensor
    delta: Tensor
    band: Band
    scale: float

    @staticmethod
    def of(
        grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, band: Band, scale: float
    ) -> _Site:
        b, hq, sq, d = query.shape
        hk = key.shape[1]
        grouped = (b, hk, hq // hk, sq)
        delta = (out.float() * grad_out.float()).sum(-1)
        return _Site(
            query.reshape(*grouped, d),
            key,
            value,
            grad_out.reshape(*grouped, d),
            lse[..., :sq].reshape(grouped),
            delta.reshape(grouped),
            band,
            scale,
        )

    def problem(self, tiles: Tiles) -> Problem:
        return Problem(
            self.band, self.q.shape[3], self.k.shape[2], tiles.block_q, tiles.block_kv, heads=min(self.k.shape[1], 2)
        )

    def pair(self, heads: slice, g: int, q_rows: Tensor, kv_rows: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        """p and ds of one tile pair, rounded to the input's dtype."""
        q, do = self.q[:, heads, g, q_rows], self.do[:, heads, g, q_rows]
        keep = visible(band, q_rows, kv_rows)
        s = logits(q, self.k[:, heads, kv_rows], self.scale)
        p = torch.where(keep, torch.exp(s - self.lse[:, heads, g, q_rows, None].float()), 0.0)
        dp = do.float() @ self.v[:, heads, kv_rows].float().transpose(-1, -2)
        ds = torch.where(keep, p * (dp - self.delta[:, heads, g, q_rows, None]), 0.0)
        return p.to(q.dtype).float(), ds.to(q.dtype).float()

    def rows(self, tile: int, block: int, length: int) -> Tensor:
        return torch.arange(tile * block, min((tile + 1) * block, length), device=self.q.device)

    def kv_pass(self, schedule: str, tiles: Tiles, *, accumulate: bool) -> tuple[Tensor, Tensor, Tensor]:
        """dk, dv (unscaled) kv tile by kv tile and, if asked for, dq (unscaled) accumulated by rank."""
        problem = self.problem(tiles)
        dq, dk, dv = (torch.zeros_like(t, dtype=torch.float32) for t in (self.q, self.k, self.v))
        for heads, columns in _head_classes(schedule, problem):
            turns = _Turns(dq[:, heads])
            for column in columns:
                kv_rows = self.rows(column.kv, tiles.block_kv, problem.kv_len)
                k = self.k[:, heads, kv_rows].float()
                for g in range(self.q.shape[2]):
                    for q_tile, rank in column.steps:
                        q_rows = self.rows(q_tile, tiles.block_q, problem.q_len)
                        p, ds = self.pair(heads, g, q_rows, kv_rows, problem.resolved.band)
                        dv[:, heads, kv_rows] += p.transpose(-1, -2) @ self.do[:, heads, g, q_rows].float()
                        dk[:, heads, kv_rows] += ds.transpose(-1, -2) @ self.q[:, heads, g, q_rows].float()
                        if accumulate:
                            turns.add(g, q_tile, q_rows, rank, ds @ k)
            turns.check()
        return dq, dk, dv

    def dq_pass(self, tiles: Tiles) -> Tensor:
        """dq (unscaled), q tile by q tile, kv tiles ascending."""
        problem = self.problem(tiles)
        tail, kv_range = problem.tail(), functions("two_pass", problem).dash_kv_range
        dq = torch.zeros_like(self.q, dtype=torch.float32)
        everyone = slice(None)
        for q_tile in range(problem.n_q):
            q_rows = self.rows(q_tile, tiles.block_q, problem.q_len)
            first, _, _, end = kv_range(q_tile, *tail)
            for kv in range(first, end):
                kv_rows = self.rows(kv, tiles.block_kv, problem.kv_len)
                for g in range(self.q.shape[2]):
                    _, ds = self.pair(everyone, g, q_rows, kv_rows, problem.resolved.band)
                    dq[:, :, g, q_rows] += ds @ self.k[:, :, kv_rows].float()
        return dq


class _Turns:
    """Adds contributions to dq in rank order, holding back those that come before their turn."""

    def __init__(self, dq: Tensor) -> None:
        self.dq = dq
        self.next: dict[tuple[int, int], int] = {}
        self.early: dict[tuple[int, int, int], Tensor] = {}

    def add(self, g: int, q_tile: int, q_rows: Tensor, rank: int, contribution: Tensor) -> None:
        self.early[g, q_tile, rank] = contribution
        turn = self.next.get((g, q_tile), 0)
        while (g, q_tile, turn) in self.early:
            self.dq[:, :, g, q_rows] += self.early.pop((g, q_tile, turn))
            turn += 1
        self.next[g, q_tile] = turn

    def check(self) -> None:
        assert not self.early, f"ranks with holes: {sorted(self.early)}"


def _head_classes(schedule: str, problem: Problem) -> list[tuple[slice, list[Column]]]:
    """Heads that share walks and ranks (at most by parity), with their columns in launch order."""
    columns: list[list[Column]] = [[] for _ in range(problem.heads)]
    for job in tables(schedule, problem):
        columns[job.head].extend(job.columns)
    if all(c == columns[0] for c in columns):
        return [(slice(None), columns[0])]
    return [(slice(parity, None, 2), c) for parity, c in enumerate(columns)]
