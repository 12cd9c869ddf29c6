"""Reference executor of the backward: runs a plan in plain ATen, tile by tile, by the tables of its schedule.

It is slow and simple on purpose.  It is the CPU path, the eager kernel of `attention_backward`, and the tests' oracle.
Like the kernels it keeps scores and sums in fp32, rounds p and ds to the input's dtype before they enter a matmul, and
reads neither rows that see no key nor keys that no row sees.  Tile pairs without a visible pair add nothing.

Every matmul multiplies two contiguous matrices and is never batched, because a CPU's result for a matrix in a batch
depends on the batch size.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...model.attention_spec import AttentionSpec
from ...model.components import Component
from ...model.mask import Band
from ...model.plan import Plan, Tiles
from ...schedule.jobs import scheduled_query_heads, tables
from ...schedule.tile_schedule import Problem, functions
from ..common.score import derivative, score
from ..families import family
from .dropout import ElementDropout
from .varlen_layout import VarlenLayout


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    extras: Sequence[Tensor],
    spec: AttentionSpec,
    plan: Plan,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes (dq, dk, dv), contiguous, with the dtypes of query, key and value.

    Shapes are those of `operators.attention`, but packed tensors are [1, heads, tokens, head dim], as by `heads_first`.
    """
    varlen_layout = VarlenLayout.of(spec, extras)
    if varlen_layout is not None:
        do, q, k, v, o = (varlen_layout.filled(t) for t in (grad_out, query, key, value, out))
        if spec.grad_logsumexp is not None:
            extras = list(extras)
            extras[spec.grad_logsumexp.index] = varlen_layout.filled(extras[spec.grad_logsumexp.index][..., None])[
                ..., 0
            ]
        gradients = backward(do, q, k, v, o, logsumexp, extras, VarlenLayout.of_rows(spec), plan)
        dq, dk, dv = (varlen_layout.emptied(t, query.shape[2]) for t in gradients)
        return dq, dk, dv
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (query, key, value))
    scale = spec.scale
    for b in range(query.shape[0]):
        data = ElementData.of(extras, spec, b, (*query.shape[:3], key.shape[2]))
        tensors = grad_out[b], query[b], key[b], value[b], out[b], logsumexp[b], _grad_logsumexp(extras, spec, b)
        drops = ElementDropout.of(extras, spec, b)
        element = _Element.of(*tensors, spec.mask.band, scale, data, drops)
        dq_sums, dk_sums, dv_sums = element.kv_pass(plan)
        if plan.dq is not None:
            dq_sums = element.dq_pass(plan.dq)
        dq[b], dk[b], dv[b] = dq_sums * scale, dk_sums * scale, drops.rescaled(dv_sums)
        if data.hides:
            dk[b], dv[b] = (torch.where(element.keys[..., None], t, 0.0) for t in (dk[b], dv[b]))
            dq[b] = torch.where(element.rows[..., None], dq[b], 0.0)
    return dq, dk, dv


def delta(grad_out: Tensor, out: Tensor, extras: Sequence[Tensor], spec: AttentionSpec) -> Tensor:
    """Computes delta, which the softmax backward subtracts from dP: fp32 [batch, q heads, q_len].

    It is rowsum(grad_out * out), less the gradient of the log-sum-exp if there is one.  Varlen layouts are not
    supported.
    """
    sums = (out.float() * grad_out.float()).sum(-1)
    return sums if spec.grad_logsumexp is None else sums - extras[spec.grad_logsumexp.index]


def bias_gradient(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    extras: Sequence[Tensor],
    spec: AttentionSpec,
    plan: Plan,
) -> Tensor:
    """Computes the bias gradient, contiguous and in the bias's dtype: [batch or 1, q heads or 1, q_len, kv_len].

    The dimensions batch elements (0) and heads (1) have size 1 if they are in `Bias.summed`.  dS is summed in fp32, one
    batch element after the other and, within each, one head after the other.
    """
    assert spec.bias is not None
    (batch, q_heads, q_len, _), kv_len = query.shape, key.shape[2]
    size = [1 if dim in spec.bias.summed else length for dim, length in enumerate((batch, q_heads))]
    sums = query.new_zeros(*size, q_len, kv_len, dtype=torch.float32)
    for b in range(batch):
        data = ElementData.of(extras, spec, b, (batch, q_heads, q_len, kv_len))
        tensors = grad_out[b], query[b], key[b], value[b], out[b], logsumexp[b], _grad_logsumexp(extras, spec, b)
        element = _Element.of(*tensors, spec.mask.band, spec.scale, data, ElementDropout.of(extras, spec, b))
        problem = element.problem(plan.dkdv, 1)
        for head in range(q_heads):
            total = sums[b % size[0], head % size[1]]
            for q_tile, kv in itertools.product(range(problem.n_q), range(problem.n_kv)):
                rows, keys = tile_of(q_tile, problem.block_q, q_len), tile_of(kv, problem.block_kv, kv_len)
                total[rows, keys] += element.exact_pair(head, rows, keys)[1]
    return sums.to(extras[spec.bias.operand.index].dtype)


def _grad_logsumexp(extras: Sequence[Tensor], spec: AttentionSpec, b: int) -> Tensor | None:
    """Returns the gradient of the log-sum-exp of one batch element, fp32 [q heads, q_len]; None without one."""
    return None if spec.grad_logsumexp is None else extras[spec.grad_logsumexp.index][b]


@dataclass(frozen=True)
class ElementData:
    """The operands of the mask and of the scores, for one batch element.

    Attributes:
        components: for each component of the mask, the values of its operands, without the batch dimension: [q_len],
            [kv_len] or, for dense masks, [q heads, q_len, kv_len].
        bias: what a bias and ALiBi slopes add to the scores, floats [q heads, q_len, kv_len]; None if there is neither.
        spec: the attention spec, whose score modifiers are applied.
    """

    components: Sequence[tuple[Component, dict[str, Tensor]]]
    bias: Tensor | None
    spec: AttentionSpec
    kv_len: int

    @staticmethod
    def of(extras: Sequence[Tensor], spec: AttentionSpec, b: int, plane: Sequence[int]) -> ElementData:
        """Returns the operands for batch element `b`: those of mask components, and what is added to scores.

        Args:
            extras: the extra tensors of the call, those of the mask first.
            spec: the attention spec.
            b: the batch element.
            plane: the shape of the scores: [batch, q heads, q_len, kv_len].
        """

        def value(component: Component, field: str) -> Tensor:
            tensor = extras[component.given[field].index]
            return (tensor.expand(plane) if "h" in component.AXES[field] else tensor)[b]

        return ElementData(
            [
                (component, {field: value(component, field) for field in component.given})
                for component in spec.mask.components.values()
            ],
            _added(extras, spec, b, plane),
            spec,
            plane[3],
        )

    @property
    def hides(self) -> bool:
        """Whether a row may have no visible key, because of a mask component other than the band or a bias of -inf."""
        return bool(self.components) or self.bias is not None

    @property
    def by_query(self) -> bool:
        """Whether the mask components may show different keys to different queries."""
        return any("q" in axes for component, _ in self.components for axes in component.AXES.values())

    @property
    def by_head(self) -> bool:
        """Whether the mask components may show different keys to different heads."""
        return any("h" in axes for component, _ in self.components for axes in component.AXES.values())

    def scores(self, query: Tensor, key: Tensor, scale: float, head: int, rows: slice, keys: slice) -> Tensor:
        """Computes the scores of these rows and keys of a query head, with score modifiers and bias: fp32 [rows, keys].

        query, key: only these rows and keys, [rows, head dim] and [keys, head dim].  Both may have further rows, which
            the bias does not change.
        """
        found = score(logits(query, key, scale), self.spec)
        if self.bias is None:
            return found
        bias = self.bias[head, rows, keys].float()
        return found + F.pad(bias, (0, found.shape[1] - bias.shape[1], 0, found.shape[0] - bias.shape[0]))

    def shows(self, head: int, rows: slice, keys: slice) -> Tensor | bool:
        """Whether the mask components, without the band, show these keys to these rows of a query head.

        The result is True or a tensor that broadcasts to booleans [rows, keys].
        """
        indices = {("b", "q"): (rows, None), ("b", "kv"): (None, keys), ("b", "h", "q", "kv"): (head, rows, keys)}
        shown: Tensor | bool = True
        for component, values in self.components:
            parts = {field: value[indices[component.AXES[field]]] for field, value in values.items()}
            kv = torch.arange(self.kv_len, device=next(iter(values.values())).device)
            shown = component.shows(parts, kv[None, keys]) & shown
        return shown


def _added(extras: Sequence[Tensor], spec: AttentionSpec, b: int, plane: Sequence[int]) -> Tensor | None:
    """What a bias and ALiBi slopes add to the scores of one batch element: floats [q heads, q_len, kv_len]."""
    bias = None if spec.bias is None else extras[spec.bias.operand.index].expand(plane)[b]
    if spec.slopes is None:
        return bias
    slopes, (q_len, kv_len) = extras[spec.slopes.index].expand(plane[:2])[b], plane[2:]
    last, keys = (torch.arange(length, device=slopes.device) for length in (q_len, kv_len))
    distance = (last[:, None] + kv_len - q_len - keys).abs()
    found = -slopes[:, None, None] * distance.float()
    return found if bias is None else bias.float() + found


def logits(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Computes the scaled products of queries [..., m, d] and keys [..., n, d]: fp32 [..., m, n]."""
    return (query.float() @ key.float().transpose(-1, -2)) * scale


def visible(band: Band, q_rows: Tensor, kv_rows: Tensor) -> Tensor:
    """Returns whether queries at `q_rows` see keys at `kv_rows` by the band: bool [len(q_rows), len(kv_rows)].

    The band is anchored top left.
    """
    distance = q_rows[:, None] - kv_rows[None, :]
    keep = torch.ones_like(distance, dtype=torch.bool)
    if band.lo is not None:
        keep &= distance >= band.lo
    if band.hi is not None:
        keep &= distance <= band.hi
    return keep


def looked_at(query: Tensor, key: Tensor, band: Band, data: ElementData) -> tuple[Tensor, Tensor]:
    """Returns which queries see any key, and which keys any query may see, for one batch element.

    They are bool [q heads or 1, q_len] and [kv heads or 1, kv_len].  query, key: [heads, length, head dim].
    """
    (q_heads, q_len, _), (kv_heads, kv_len, _), device = query.shape, key.shape, query.device
    everything = Problem(band, q_len, kv_len, q_len, kv_len)
    f, tail = functions("two_pass", everything), everything.tail()
    row, place = torch.arange(q_len, device=device), torch.arange(kv_len, device=device)
    if data.by_query:
        band = everything.resolved.band
        heads = q_heads if data.by_head else 1
        keep = torch.stack([visible(band, row, place) & data.shows(h, slice(None), slice(None)) for h in range(heads)])
        keys = keep.any(1)
        return keep.any(2), keys if heads == 1 else keys.unflatten(0, (kv_heads, -1)).any(1)
    rows, keys = (
        (x >= first) & (x < end)
        for x, (first, end) in ((row, f.dash_seen_rows(*tail)), (place, f.dash_seen_keys(*tail)))
    )
    if data.components:
        keys = keys & torch.as_tensor(data.shows(0, slice(None), slice(None)))[0]
        below = F.pad(keys.cumsum(0), (1, 0))  # how many keys lie below each position
        lo, hi = everything.resolved.band.lo, everything.resolved.band.hi
        first = torch.zeros_like(row) if hi is None else (row - hi).clamp(0, kv_len)
        end = torch.full_like(row, kv_len) if lo is None else (row - lo + 1).clamp(0, kv_len)
        rows = rows & (below[end] > below[first])
    return rows[None], keys[None]


def only(tensor: Tensor, part: Tensor, elsewhere: float = 0.0) -> Tensor:
    """Returns `tensor` [heads, length, ...] in fp32, contiguous, with `elsewhere` at the positions not in `part`.

    The tensor's values at these positions do not matter.

    part: booleans [heads or 1, length].
    """
    shape = (*part.shape, *[1] * (tensor.dim() - 2))
    return torch.where(part.view(shape), tensor.float(), elsewhere).contiguous()


@dataclass(frozen=True)
class _Element:
    """Operands of one batch element and the mask; gradients by query head and kv head.

    q, do: [q heads, q_len, head dim]; k, v: [kv heads, kv_len, head dim]; lse, excess, delta: [q heads, q_len]; all
    fp32 and contiguous; the log-sum-exp is the sum of the first two.  Rows that see no key and keys that no row sees
    are zero, whatever the tensors hold there, and the log-sum-exp of such a row is infinite.  rows: who sees a key;
    keys: who may be seen (see `looked_at`).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    lse: Tensor
    excess: Tensor
    delta: Tensor
    band: Band
    scale: float
    dtype: torch.dtype
    rows: Tensor
    keys: Tensor
    data: ElementData
    drops: ElementDropout

    @staticmethod
    def of(
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        grad_lse: Tensor | None,
        band: Band,
        scale: float,
        data: ElementData,
        drops: ElementDropout,
    ) -> _Element:
        q_len, kv_len = query.shape[1], key.shape[1]
        rows, keys = looked_at(query, key, band, data)
        excess = torch.zeros_like(lse[:, :q_len])
        if data.bias is not None:  # the log-sum-exp has two parts
            rows = rows & (lse[:, :q_len] != float("-inf"))
            excess = lse[:, q_len : 2 * q_len] * math.log(2)
        q, do, o = (only(t, rows) for t in (query, grad_out, out))
        k, v = (only(t, keys) for t in (key, value))
        sums, excess = only(lse[:, :q_len], rows, float("inf")), only(excess, rows)
        resolved = Problem(band, q_len, kv_len, q_len, kv_len).resolved.band
        delta = (o * do).sum(-1)
        if grad_lse is not None:
            delta = delta - only(grad_lse, rows)
        return _Element(q, k, v, do, sums, excess, delta, resolved, scale, query.dtype, rows, keys, data, drops)

    def problem(self, tiles: Tiles, heads: int) -> Problem:
        return Problem(self.band, self.q.shape[1], self.k.shape[1], tiles.block_q, tiles.block_kv, heads=heads)

    def pair(self, q_head: int, rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
        """Computes (p, ds) of one tile pair of a query head, fp32 but rounded to the input's dtype.

        They are [rows, keys]; p is zero where dropout drops it.
        """
        p, ds = self.exact_pair(q_head, rows, keys)
        ds = self.scaled(ds, q_head, rows, keys)
        return self.drops.kept(p, q_head, rows, keys).to(self.dtype).float(), ds.to(self.dtype).float()

    def exact_pair(self, q_head: int, rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
        """Computes (P before dropout, dS) of one tile pair of a query head, both fp32 [rows, keys]."""
        kv_head, keep = self.kv_head(q_head), self.keep(q_head, rows, keys)
        s = self.data.scores(self.q[q_head, rows], self.k[kv_head, keys], self.scale, q_head, rows, keys)
        sums, excess = self.lse[q_head, rows, None], self.excess[q_head, rows, None]
        p = torch.where(keep, torch.exp(s - sums - excess), 0.0)
        dp = self.drops.rescaled(self.drops.kept(self.do[q_head, rows] @ self.v[kv_head, keys].T, q_head, rows, keys))
        ds = torch.where(keep, p * (dp - self.delta[q_head, rows, None]), 0.0)
        return p, ds

    def scaled(self, ds: Tensor, q_head: int, rows: slice, keys: slice) -> Tensor:
        """Returns the gradient of the scaled products ``q @ k.T * scale``, given `ds`, that of the scores.

        The two differ if the call has a score modifier.  `ds` and the result are [rows, keys].
        """
        s = logits(self.q[q_head, rows], self.k[self.kv_head(q_head), keys], self.scale)
        return derivative(ds, s, self.data.spec)

    def keep(self, q_head: int, rows: slice, keys: slice) -> Tensor:
        """Returns whether the (query, key) pairs of a tile pair of a query head are visible: bool [rows, keys]."""
        q_rows, kv_rows = (torch.arange(part.start, part.stop, device=self.q.device) for part in (rows, keys))
        return visible(self.band, q_rows, kv_rows) & self.data.shows(q_head, rows, keys)

    def kv_head(self, q_head: int) -> int:
        return q_head // (self.q.shape[0] // self.k.shape[0])

    def kv_pass(self, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
        """Computes (dq, dk, dv), dq and dk unscaled, kv tile by kv tile.

        dq is accumulated in the order of ranks; it stays zero in a two-pass plan.
        """
        scheduled = scheduled_query_heads(family(plan.kernel).cta_per_query_head, self.q.shape[0], self.k.shape[0])
        problem = self.problem(plan.dkdv, len(scheduled))
        dq = torch.zeros_like(self.q)
        dk, dv = (t.new_zeros(len(scheduled), *t.shape[1:]) for t in (self.k, self.v))
        sums = _OrderedSums(dq)
        for job in tables(plan.schedule, problem):
            for column in job.columns:
                keys = tile_of(column.kv, problem.block_kv, problem.kv_len)
                for q_head in scheduled[job.head]:
                    k = self.k[self.kv_head(q_head), keys]
                    for q_tile, rank in column.steps:
                        rows = tile_of(q_tile, problem.block_q, problem.q_len)
                        added = torch.zeros_like(self.q[q_head, rows])
                        if self.keep(q_head, rows, keys).any():  # else zero times what others hold, which may be NaN
                            p, ds = self.pair(q_head, rows, keys)
                            dv[job.head, keys] += p.T @ self.do[q_head, rows]
                            dk[job.head, keys] += ds.T @ self.q[q_head, rows]
                            added = ds @ k
                        if plan.dq is None:
                            sums.add(q_head, rows, rank, added)
        sums.check()
        return dq, self.by_kv_head(dk), self.by_kv_head(dv)

    def by_kv_head(self, sums: Tensor) -> Tensor:
        """Returns sums by kv head, [kv heads, ...], from one sum per scheduled head.

        The sums of a group of query heads are added in their order.
        """
        members: tuple[Tensor, ...] = sums.split(self.k.shape[0])
        return functools.reduce(torch.add, members)

    def dq_pass(self, tiles: Tiles) -> Tensor:
        """Computes dq (unscaled) of a two-pass plan, q tile by q tile, adding kv tiles in ascending order."""
        problem = self.problem(tiles, heads=1)
        tail, kv_range = problem.tail(), functions("two_pass", problem).dash_kv_range
        dq = torch.zeros_like(self.q)
        for q_head in range(self.q.shape[0]):
            for q_tile in range(problem.n_q):
                rows = tile_of(q_tile, problem.block_q, problem.q_len)
                first, _, _, end = kv_range(q_tile, *tail)
                for kv in range(first, end):
                    keys = tile_of(kv, problem.block_kv, problem.kv_len)
                    if self.keep(q_head, rows, keys).any():
                        _, ds = self.pair(q_head, rows, keys)
                        dq[q_head, rows] += ds @ self.k[self.kv_head(q_head), keys]
        return dq


def tile_of(tile: int, block: int, length: int) -> slice:
    """Returns the positions of tile number `tile`, of `block` positions, as a slice that ends at `length` at most."""
    return slice(tile * block, min((tile + 1) * block, length))


class _OrderedSums:
    """Adds contributions to dq in rank order, holding back those that come too early."""

    def __init__(self, dq: Tensor) -> None:
        self.dq = dq
        self.next: dict[tuple[int, int], int] = {}
        self.early: dict[tuple[tuple[int, int], int], Tensor] = {}

    def add(self, q_head: int, rows: slice, rank: int, contribution: Tensor) -> None:
        tile = q_head, rows.start
        self.early[tile, rank] = contribution
        rank_of_next = self.next.get(tile, 0)
        while (tile, rank_of_next) in self.early:
            self.dq[q_head, rows] += self.early.pop((tile, rank_of_next))
            rank_of_next += 1
        self.next[tile] = rank_of_next

    def check(self) -> None:
        assert not self.early, f"ranks with holes: {sorted(self.early)}"
