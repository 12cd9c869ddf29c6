"""Reference executor of the portable forward: the order of its kernel in plain ATen, tile by tile.

Like the reference backward it is slow and simple on purpose: plans with this forward use it as the eager kernel, and
tests use it as the oracle.  Like the kernel it keeps scores and sums in fp32, rounds p to the input's dtype before it
enters a matmul, and reads neither keys that no row sees nor rows that see no key.  Every matmul multiplies two
contiguous matrices, and every tile has all of its rows and keys, of which those past the lengths are hidden: a CPU's
result for a row depends on the shapes of matrices and sums, so that it would otherwise depend on the lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...model.attention_spec import AttentionSpec
from ...model.plan import Tiles
from ...schedule.tile_schedule import Problem, functions
from .backward import ElementData, looked_at, only, tile_of, visible
from .dropout import ElementDropout
from .varlen_layout import VarlenLayout


def forward(
    query: Tensor, key: Tensor, value: Tensor, extras: Sequence[Tensor], spec: AttentionSpec, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """Computes (out, log-sum-exp), both contiguous.

    out: [batch, q heads, q_len, value dim] in query's dtype; log-sum-exp: natural, fp32 [batch, q heads, q_len], or 2 *
    q_len with a bias, for its two parts (`ops.numbers_per_row`).  A row that sees no key gives zeros and -inf, or its
    sink.  With a varlen layout the log-sum-exp has padded rows.

    Args:
        query, key, value: [batch, heads, length, dim], packed tensors with batch size 1; the number of query heads is a
            multiple of that of the others.
        extras: the tensors that the call reads.
    """
    varlen_layout = VarlenLayout.of(spec, extras)
    if varlen_layout is not None:
        q, k, v = (varlen_layout.filled(t) for t in (query, key, value))
        out, logsumexp = forward(q, k, v, extras, VarlenLayout.of_rows(spec), tiles)
        return varlen_layout.emptied(out, query.shape[2]), logsumexp
    band = spec.mask.band
    (batch, q_heads, q_len, _), (_, kv_heads, kv_len, value_dim) = query.shape, value.shape
    out = query.new_empty(batch, q_heads, q_len, value_dim)
    numbers = 2 if spec.traits.biased else 1
    logsumexp = query.new_empty(batch, q_heads, numbers, q_len, dtype=torch.float32)
    problem = Problem(band, q_len, kv_len, tiles.block_q, tiles.block_kv)
    sinks = None if spec.sinks is None else extras[spec.sinks.index].expand(batch, q_heads, q_len)
    for b in range(batch):
        data, drops = (
            ElementData.of(extras, spec, b, (batch, q_heads, q_len, kv_len)),
            ElementDropout.of(extras, spec, b),
        )
        sees, seen = looked_at(query[b], key[b], band, data)
        q, k, v = only(query[b], sees), only(key[b], seen), only(value[b], seen)
        for head in range(q_heads):
            kv_head = head // (q_heads // kv_heads)
            for tile in range(problem.n_q):
                rows = tile_of(tile, problem.block_q, q_len)
                sink = None if sinks is None else sinks[b, head, rows]
                found = _attend(
                    q[head, rows], k[kv_head], v[kv_head], data, drops, head, problem, tile, spec.scale, query.dtype,
                    sink,
                )  # fmt: skip
                out[b, head, rows], largest, excess = (each[: rows.stop - rows.start] for each in found)
                logsumexp[b, head, 0, rows] = largest if data.bias is not None else largest + excess
                logsumexp[b, head, 1:, rows] = excess / math.log(2)
    return out, logsumexp.flatten(2)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    data: ElementData,
    drops: ElementDropout,
    head: int,
    problem: Problem,
    tile: int,
    scale: float,
    dtype: torch.dtype,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, largest score, log of the sum of what exceeds it) of all rows of one q tile, fp32; q: its rows, k and v:
    the head's; sink: of each row.
    """
    kv_range = functions("two_pass", problem).dash_kv_range
    first, _, _, end = kv_range(tile, *problem.tail())
    rows = tile_of(tile, problem.block_q, problem.q_len)
    q_rows = torch.arange(rows.start, rows.stop, device=q.device)
    q, sink = _filled(q, problem.block_q), None if sink is None else _filled(sink[:, None], problem.block_q)[:, 0]
    all_rows = slice(rows.start, rows.start + problem.block_q)
    out, total = q.new_zeros(len(q), v.shape[1]), q.new_zeros(len(q))
    largest = q.new_full((len(q),), float("-inf"))
    for kv in range(first, end):
        keys = tile_of(kv, problem.block_kv, problem.kv_len)
        keep = visible(problem.resolved.band, q_rows, torch.arange(keys.start, keys.stop, device=q.device))
        keep &= data.shows(head, rows, keys)
        if not keep.any():  # zero times what others hold, which may be NaN
            continue
        keep = F.pad(keep, (0, problem.block_kv - keep.shape[1], 0, problem.block_q - keep.shape[0]))
        k_tile, v_tile = (_filled(t[keys], problem.block_kv) for t in (k, v))
        all_keys = slice(keys.start, keys.start + problem.block_kv)
        s = torch.where(keep, data.scores(q, k_tile, scale, head, rows, keys), float("-inf"))
        larger = torch.maximum(largest, s.amax(1))
        shift = torch.where(larger == float("-inf"), 0.0, larger)  # a row that has seen no key yet
        p, shrink = torch.exp(s - shift[:, None]), torch.exp(largest - shift)
        total = total * shrink + p.sum(1)
        out = out * shrink[:, None] + drops.kept(p, head, all_rows, all_keys).to(dtype).float() @ v_tile
        largest = larger
    if sink is not None:
        larger = torch.maximum(largest, sink)
        shift = torch.where(larger == float("-inf"), 0.0, larger)
        shrink = torch.exp(largest - shift)
        total, out, largest = total * shrink + torch.exp(sink - shift), out * shrink[:, None], larger
    sees = total != 0.0
    total = torch.where(sees, total, 1.0)
    return torch.where(sees[:, None], drops.rescaled(out / total[:, None]), 0.0), largest, torch.log(total)


def _filled(tensor: Tensor, length: int) -> Tensor:
    """A copy of a tensor [tokens, numbers], with rows of zeros after it up to this length."""
    return F.pad(tensor, (0, 0, 0, length - tensor.shape[0]))
