"""Scatters by tensors of indices, of random shapes, dimensions, strides and indices, beside PyTorch's."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor

from ..support.fuzzed import Case, Program, cases, check

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def _numbers(r: random.Random, shape: list[int], dtype: torch.dtype) -> Tensor:
    """A tensor of a shape, contiguous or not, or expanded."""
    how = r.choice(["plain", "plain", "transposed", "expanded", "cut"])
    if dtype == torch.bool:
        full = torch.rand(*shape) < 0.5
    elif dtype.is_floating_point:
        full = torch.randn(*shape).to(dtype)
    else:
        full = torch.randint(0 if dtype == torch.uint8 else -9, 10, shape, dtype=dtype)
    if how == "transposed" and len(shape) > 1:
        return full.transpose(0, -1).contiguous().transpose(0, -1)
    if how == "expanded" and len(shape) > 1:
        return full[:1].expand(shape)
    if how == "cut":
        return torch.cat([full, full], -1)[..., : shape[-1]]
    return full


def _order(r: random.Random, count: int, rows: int) -> Program:
    """Makes `count` indices of `rows` rows from scores [count]."""
    how = r.choice(["permutation", "lists", "strided", "distinct", "topk", "any", "negative", "int32"])
    times = count // rows if rows and count % rows == 0 else 0

    def make(scores: Tensor) -> Tensor:
        order = torch.argsort(scores, stable=True)
        if how in ("permutation", "lists") and times:
            return order // times
        if how == "strided" and times:
            return order % rows
        if how == "distinct" and count <= rows:
            return order
        if how == "topk" and count <= rows:
            return torch.cat([scores, scores.new_zeros(rows - count)]).topk(count).indices
        found = (scores.double().abs() * 1000).long() % rows
        if how == "negative":
            return found - rows * (found % 2)
        return found.int() if how == "int32" else found

    return make


def make(r: random.Random) -> Case:
    shape = [r.choice([1, 2, 3, 4, 6, 8, 12]) for _ in range(r.choice([1, 2, 2, 3]))]
    dim = r.randrange(len(shape))
    rows, dtype = shape[dim], r.choice(DTYPES)
    count = r.choice([rows, rows, 2 * rows, 3 * rows, 9 * rows, 17 * rows, max(1, rows // 2), r.randrange(1, 20)])
    kind = r.choice(["index_put", "index_put", "scatter", "scatter_add", "index_add", "index", "gather", "embedding"])
    base = r.choice(["zeros", "zeros", "full", "tensor"])
    adds, order = r.random() < 0.6, _order(r, count, rows)
    given = [*shape[:dim], count, *shape[dim + 1 :]]
    if kind in ("index", "gather", "embedding") and not dtype.is_floating_point:
        dtype = torch.float32
    values, scores, into = _numbers(r, given, dtype), torch.randn(count), _numbers(r, shape, dtype)
    by_line, number = r.random() < 0.3, r.choice([0, 1, 3])

    def index_of(scores: Tensor, values: Tensor) -> Tensor:
        """Indices with the shape of values."""
        at = order(scores).long() % rows
        if by_line:
            return torch.argsort(values.float(), dim=dim, stable=True) % rows
        return at.reshape([-1] + [1] * (len(shape) - dim - 1)).expand(values.shape)

    def program(scores: Tensor, values: Tensor, into: Tensor) -> Tensor:
        kind_of = values.dtype
        onto = {"zeros": torch.zeros(shape, dtype=kind_of), "full": torch.full(shape, number, dtype=kind_of)}.get(
            base, into
        )
        if kind == "index_put":
            return torch.ops.aten.index_put(onto, [*[None] * dim, order(scores)], values, adds)
        if kind == "scatter":
            return onto.scatter(dim, index_of(scores, values), values if count % 2 else number)
        if kind == "scatter_add":
            return onto.scatter_add(dim, index_of(scores, values), values)
        if kind == "index_add":
            return onto.index_add(dim, order(scores).long() % rows, values)
        if kind == "gather":
            return into.gather(dim, index_of(scores, values)) * values
        if kind == "embedding":
            return F.embedding(order(scores).long() % rows, into.movedim(dim, 0).reshape(rows, -1))
        return into[(*[slice(None)] * dim, order(scores))] * values

    if dtype.is_floating_point and dtype.itemsize >= 4:
        values.requires_grad_()
        into.requires_grad_()
    elif dtype.is_floating_point:
        into.requires_grad_(kind in ("index", "gather", "embedding"))
    collides = kind == "scatter" or (kind == "index_put" and not adds)
    dynamic = r.random() < 0.2
    name = f"{kind} {shape} {dim} {count} {dtype} {base} adds={adds} lines={by_line}"
    return Case(name, program, [scores, values, into], dynamic, exact=not dtype.is_floating_point or collides)


def test_scatters() -> None:
    check(make, "scatters", cases(30), least=0.3)
