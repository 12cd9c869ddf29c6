"""Short sums, tables, masks, medians and scatters of few elements: random shapes, dtypes, strides and indices."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ..support.fuzzed import Case, cases, check
from ..support.shown_memory import WRITES

HALF = [torch.bfloat16, torch.float16]
FLOATS = [torch.float32, torch.float32, torch.float64, *HALF]


def _laid_out(r: random.Random, tensor: Tensor) -> Tensor:
    """The elements of a tensor: contiguous, transposed, apart, or one row for all."""
    how = r.choice(["plain", "plain", "transposed", "apart", "expanded"]) if tensor.dim() > 1 else "plain"
    if how == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if how == "apart":
        return torch.stack([tensor, tensor], -1)[..., 0]
    return tensor[:1].expand(tensor.shape) if how == "expanded" else tensor


def _written(r: random.Random) -> tuple[int, str]:
    return r.choice([0, 0, -1]), r.choice([*WRITES])


def unrolled_reductions(r: random.Random) -> Case:
    shape = [r.choice([1, 2, 3, 5]) for _ in range(r.choice([0, 1, 2]))]
    dim = len(shape)
    shape += [r.choice([7, 8, 8, 9, 9, 12, 16, 17]), *(r.choice([1, 3, 16, 33]) for _ in range(r.choice([1, 1, 2])))]
    dtype, keepdim, wide = r.choice([*FLOATS, torch.int32]), r.random() < 0.4, r.random() < 0.2
    x = torch.randn(shape)
    if r.random() < 0.2:
        x.view(-1)[r.randrange(x.numel())] = r.choice([torch.nan, torch.inf])
    before: Callable[[Tensor], Tensor] = r.choice([lambda x: x, lambda x: x * 2, torch.relu])
    after: Callable[[Tensor], Tensor] = r.choice([lambda s: s, lambda s: s * s, lambda s: s.flatten(), lambda s: s[:1]])
    negative = r.random() < 0.5
    both = r.random() < 0.3

    def program(x: Tensor) -> tuple[Tensor, ...]:
        rows = before(x)
        dims = dim - rows.dim() if negative else dim
        kind = torch.float32 if wide and rows.dtype in HALF else None
        total = rows.sum(dims, keepdim=keepdim, dtype=kind)
        return (after(total), rows * 2) if both else (after(total),)

    made = _laid_out(r, x).to(dtype).requires_grad_(dtype.is_floating_point and r.random() < 0.7)
    name = f"{shape} {dim} {dtype} {keepdim} {wide} {both} {made.stride()}"
    return Case(name, program, [made], r.random() < 0.2, written=_written(r))


def tied(r: random.Random) -> Case:
    rows, columns, dtype = r.choice([5, 64, 257, 300]), r.choice([1, 8, 32, 33]), r.choice(FLOATS)
    shape = [r.choice([1, 4, 9, 40]) for _ in range(r.choice([1, 2]))]
    tokens = torch.randint(0, r.choice([1, 3, rows]), shape, dtype=r.choice([torch.int64, torch.int32]))
    padding = r.choice([None, None, 0, rows - 1])
    twice, frequent, bias = r.random() < 0.2, r.random() < 0.2, r.random() < 0.3
    scaled, detached = r.choice([None, columns**0.5]), r.random() < 0.1
    wanted = r.choice(["both", "logits", "hidden"])

    def program(weight: Tensor, tokens: Tensor, added: Tensor) -> tuple[Tensor, ...]:
        table = weight.detach() if detached else weight
        hidden = F.embedding(tokens, table, padding, scale_grad_by_freq=frequent)
        if twice:
            hidden = hidden + F.embedding(tokens.flip(0), weight)
        hidden = torch.tanh(hidden if scaled is None else hidden * scaled)
        logits = F.linear(hidden, weight, added if bias else None)
        return {"both": (logits, hidden), "logits": (logits,), "hidden": (hidden, (weight * 2).sum(0))}[wanted]

    weight = (torch.randn(rows, columns) / 4).to(dtype).requires_grad_()
    if r.random() < 0.2:
        weight = weight.detach().t().contiguous().t().requires_grad_()
    name = f"{rows}x{columns} {shape} {dtype} {padding} {twice} {frequent} {bias} {wanted}"
    added = torch.randn(rows).to(dtype).requires_grad_(bias)
    return Case(name, program, [weight, tokens, added], r.random() < 0.2, rounding=64, written=_written(r))


def masks(r: random.Random) -> Case:
    """Rows of sorted experts, some of which a mask may clear."""
    tokens, experts = r.choice([1, 4, 6, 12]), r.choice([4, 8, 9])
    top, columns, dtype = r.choice([1, 2, 4]), r.choice([1, 8, 32]), r.choice(FLOATS)
    limit = experts + r.choice([0, 0, 0, 1, -1])
    order = r.choice(["as they are", "sorted", "argsort"])
    compare = r.choice([
        lambda n: n >= limit, lambda n: n > limit - 1, lambda n: n < 0, lambda n: n <= -1, lambda n: n < limit,
        lambda n: n >= 0, lambda n: (n >= limit).logical_not(),
    ])  # fmt: skip
    kind, fill = r.choice(["masked_fill", "where", "where not"]), r.choice([0.0, -torch.inf])
    before: Callable[[Tensor], Tensor] = r.choice([torch.exp, lambda h: h, lambda h: h * 2, lambda h: h.clone()])
    ends = r.sample(["cleared", "rows", "square", "exp", "part", "flat", "input", "sum"], r.choice([1, 1, 2, 3]))
    gathered = r.random() < 0.7

    def program(x: Tensor, scores: Tensor) -> tuple[Tensor, ...]:
        number = scores.topk(top, -1).indices.reshape(-1)
        if order == "sorted":
            number = number.sort().values
        elif order == "argsort":
            number = number[torch.argsort(number, stable=True)]
        at = torch.arange(number.shape[0]) // top
        rows = before(x[at] if gathered else x.repeat_interleave(top, 0))
        mask = compare(number).unsqueeze(-1)
        if kind == "masked_fill":
            cleared = rows.masked_fill(mask, fill)
        else:
            other = torch.full((), fill, dtype=rows.dtype)
            cleared = torch.where(mask, rows, other) if kind == "where" else torch.where(mask, other, rows)
        found: dict[str, Callable[[], Tensor]] = {
            "cleared": lambda: cleared, "rows": lambda: rows, "square": lambda: cleared.square(),
            "exp": lambda: cleared.exp(), "part": lambda: cleared[:1], "flat": lambda: cleared.view(-1),
            "input": lambda: x.masked_fill(mask[: x.shape[0]], fill), "sum": lambda: (cleared * rows).sum(-1),
        }  # fmt: skip
        return tuple(found[end]() for end in ends)

    x = _laid_out(r, torch.randn(tokens, columns)).to(dtype).requires_grad_(r.random() < 0.7)
    scores = torch.randn(tokens, experts)
    name = f"{tokens} {experts} {top} {columns} {dtype} {limit} {order} {kind} {ends} {x.stride()}"
    return Case(name, program, [x, scores], r.random() < 0.2, written=_written(r))


def few_rows(r: random.Random) -> Case:
    rows, columns, dtype = r.choice([1, 2, 3, 4, 5]), r.choice([1, 8, 33]), r.choice(FLOATS)
    shape = [r.choice([0, 1, 7, 40]), *(r.choice([1, 5]) for _ in range(r.choice([0, 1])))]
    index = torch.randint(0, rows, shape, dtype=r.choice([torch.int64, torch.int32]))
    padding, frequent = r.choice([None, None, 0, rows - 1, -1]), r.random() < 0.2
    kind = r.choice(["plain", "transposed", "summed", "normed"])

    def program(table: Tensor, index: Tensor) -> Tensor:
        if kind == "transposed":
            return F.embedding(index, table, padding, scale_grad_by_freq=frequent).transpose(0, -1) * 2
        found = F.embedding(index, table, padding, scale_grad_by_freq=frequent)
        return {"plain": found, "summed": found.sum(0), "normed": found.float().softmax(-1)}.get(kind, found)

    table = torch.randn(rows, columns).to(dtype).requires_grad_()
    name = f"{rows}x{columns} {shape} {dtype} {padding} {frequent} {kind}"
    return Case(name, program, [table, index], r.random() < 0.2, rounding=16, written=_written(r))


def sorted_values(r: random.Random) -> Case:
    shape = [r.choice([1, 2, 5, 8]) for _ in range(r.choice([1, 2, 3]))]
    dim, keepdim = r.randrange(-len(shape), len(shape)), r.random() < 0.4
    kind = r.choice(["median", "nanmedian", "kthvalue", "kthvalue", "histc"])
    dtype = r.choice(FLOATS if kind in ("nanmedian", "histc") else [*FLOATS, torch.int64, torch.int32, torch.uint8])
    k = r.randrange(1, shape[dim] + 1)
    x = torch.randn(shape) * 3
    if r.random() < 0.5:  # equal elements
        x = x.round()
    if r.random() < 0.3 and dtype.is_floating_point:
        x.view(-1)[:: r.choice([1, 2, 3])] = r.choice([torch.nan, torch.inf, -torch.inf, -0.0])
    bins, low = r.choice([1, 3, 8]), r.choice([-2.0, -0.5, 0.0])
    high = low + r.choice([0.1, 1.0, 3.0])
    ends = r.choice(["both", "values", "places"])

    def program(x: Tensor) -> tuple[Tensor, ...]:
        if kind == "histc":
            return (torch.histc(x.detach(), bins, low, high),)
        if kind == "kthvalue":
            values, places = x.kthvalue(k, dim, keepdim)
        else:
            values, places = (x.median if kind == "median" else x.nanmedian)(dim, keepdim)
        return {"both": (values, places), "values": (values * 2,), "places": (places + 1,)}[ends]

    given = x.abs() if dtype == torch.uint8 else x
    made = _laid_out(r, given).to(dtype)
    if made.unique().numel() < made.numel() or made.isnan().sum() > 1:
        ends, wants = "values", False  # PyTorch gives any of the places of equal elements
    else:
        wants = dtype.is_floating_point and kind != "histc" and r.random() < 0.6
    name = f"{kind} {shape} {dim} {keepdim} {k} {bins} {low} {high} {dtype} {made.stride()} {x.tolist()}"
    return Case(name, program, [made.requires_grad_(wants)], r.random() < 0.2, exact=True, written=_written(r))


def small_scatter(r: random.Random) -> Case:
    """Elements of each line that are chosen or stored, in losses and routers."""
    shape = [r.choice([1, 3, 6]), *(r.choice([2, 5]) for _ in range(r.choice([0, 1]))), r.choice([2, 8, 17])]
    dim, dtype = r.randrange(len(shape)), r.choice(FLOATS)
    count, fill = min(r.choice([1, 1, 2, 4, 16, 17]), shape[dim]), r.choice([0.0, 0.0, 1.5, -torch.inf])
    kind = r.choice(
        ["gather", "topk", "labels", "scatter", "scatter_add", "scatter_add", "number", "index_put", "reduce"]
    )
    how = r.choice(["topk", "any", "any", "negative", "outside"])
    after: Callable[[Tensor], Tensor] = r.choice([lambda t: t, lambda t: t * 2, lambda t: t.sum(0), lambda t: t[:1]])
    rows = shape[dim] if how == "outside" else r.choice([shape[dim], 2])  # of two, many are equal

    def indices(x: Tensor, scores: Tensor) -> Tensor:
        if how == "topk":
            return scores.topk(count, dim).indices
        found = (scores.narrow(dim, 0, count) * 1000).long().abs() % rows
        if how == "negative" and kind == "index_put":
            return found - shape[dim] * (found % 2)
        return found + 1 if how == "outside" and kind != "number" else found  # Inductor makes `where` of that

    def program(x: Tensor, scores: Tensor) -> Tensor:
        index = indices(x, scores)
        values = x.narrow(dim, 0, count)
        into = torch.full(shape, fill, dtype=x.dtype)
        if kind == "topk":
            return after(x.topk(count, dim).values)
        if kind == "labels":
            return after(x.log_softmax(dim).gather(dim, index.narrow(dim, 0, 1)).squeeze(dim))
        if kind == "index_put":
            line = index.flatten()[:count]
            return after(torch.ops.aten.index_put(into, [*[None] * dim, line], values, True))
        return after({
            "gather": lambda: torch.sin(x).gather(dim, index),
            "scatter": lambda: into.scatter(dim, index, values),
            "scatter_add": lambda: into.scatter_add(dim, index, values),
            "number": lambda: into.scatter(dim, index, 2.5),
            "reduce": lambda: into.scatter(dim, index, values, reduce="add"),
        }[kind]())  # fmt: skip

    x = _laid_out(r, torch.randn(shape)).to(dtype).requires_grad_(kind != "reduce" and r.random() < 0.8)
    scores = torch.randn(shape)
    name = f"{kind} {shape} {dim} {count} {fill} {how} {dtype} {x.stride()}"
    return Case(name, program, [x, scores], r.random() < 0.2, rounding=16, written=_written(r))


FAMILIES = {each.__name__: each for each in (unrolled_reductions, tied, masks, few_rows, sorted_values, small_scatter)}


@pytest.mark.parametrize("family", FAMILIES)
def test_others(family: str) -> None:
    check(FAMILIES[family], family, cases(10), least=0.2)
