"""Accepted forms of attention with edges at which operators are inserted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from .inserted_operators import BATCH, BOOLEANS, ELEMENTWISE, HEADS, INTEGERS, LENGTH, OPERATORS, Operator

Edge = Callable[[str, Tensor], Tensor]
"""Called with the name of an edge and the tensor there; gives the tensor that takes its place."""


@dataclass(frozen=True)
class Form:
    """An accepted form of attention.

    Attributes:
        function: of query, key, value, [B, H, S, S], a bias [H, S, S], and the edge hook.
        edges: the names with which the function calls the hook.
        operators: what can be inserted.
        at_edge: what can be inserted at single edges instead.
        reference: the same in dense operators, where PyTorch has no eager gradient; by default the function.
    """

    function: Callable[[Tensor, Tensor, Tensor, Tensor, Edge], Tensor]
    edges: tuple[str, ...]
    operators: dict[str, Operator]
    reference: Callable[[Tensor, Tensor, Tensor, Tensor, Edge], Tensor] | None = None
    at_edge: dict[str, dict[str, Operator]] = field(default_factory=dict)

    def inserted(self, edge: str) -> dict[str, Operator]:
        """What can be inserted at an edge."""
        return self.at_edge.get(edge, self.operators)


def _order(q: Tensor) -> Tensor:
    place = torch.arange(LENGTH)
    return place[:, None] >= place


def _by_hand(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, at: Edge, *, cap: bool = False, mask: str = "", biased: bool = False,
    wide: bool = False, sink: bool = False,
) -> Tensor:  # fmt: skip
    scores = at("product", at("q", q) @ at("k", k).mT)
    scores = at("scaled", scores * 0.3)
    if cap:
        scores = at("capped", 2 * torch.tanh(scores / 2))
    if biased:
        scores = at("biased", scores + at("bias", bias))
    if mask == "where":
        scores = torch.where(_order(q), scores, torch.finfo(torch.float32).min)
    if mask == "fill":
        scores = scores.masked_fill(~_order(q), -torch.inf)
    if mask == "add":
        scores = scores + at("mask", torch.where(_order(q), 0.0, -torch.inf).to(q.dtype))
    scores = at("scores", scores)
    if sink:
        column = at("sink", bias[:, 0, 0].view(1, HEADS, 1, 1).expand(BATCH, HEADS, LENGTH, 1))
        return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1] @ at("v", v)
    weights = at("weights", F.softmax(scores, -1, dtype=torch.promote_types(torch.float32, q.dtype) if wide else None))
    return at("output", weights.to(v.dtype) @ at("v", v))


def _flat(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, at: Edge) -> Tensor:
    """[B * H, S, D] and baddbmm."""
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scores = torch.baddbmm(bias.repeat(BATCH, 1, 1), at("q", q), at("k", k).mT, beta=1, alpha=0.3)
    return at("output", at("weights", at("scores", scores).softmax(-1)) @ at("v", v))


def _einsum(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, at: Edge) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = at("scores", torch.einsum("bqhd,bkhd->bhqk", at("q", q), at("k", k)) / 3)
    return at("output", torch.einsum("bhqk,bkhd->bqhd", at("weights", scores.softmax(-1)), at("v", v)))


def _grouped(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, at: Edge) -> Tensor:
    k, v = (x[:, :1, None].expand(BATCH, 1, HEADS, LENGTH, LENGTH).reshape(x.shape) for x in (at("k", k), at("v", v)))
    weights = at("weights", at("scores", at("q", q) @ k.mT * 0.3).softmax(-1))
    return at("output", weights @ v)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, at: Edge, *, math: bool = False) -> Tensor:
    mask = at("mask", torch.where(_order(q), 0.0, -torch.inf).to(q.dtype))
    given = at("q", q), at("k", k), at("v", v), mask
    if not math:
        return at("output", F.scaled_dot_product_attention(*given))
    with sdpa_kernel(SDPBackend.MATH):
        return at("output", F.scaled_dot_product_attention(*given))


def _mod(s: Tensor, h: Any, i: Any, j: Any, bias: Tensor, at: Edge, cap: bool, hides: bool) -> Tensor:
    s = at("factor", at("score", s) * 1.5)
    if cap:
        s = at("capped", 2 * torch.tanh(s / 2))
    s = at("sum", s + at("bias", bias[h, i, j]))
    return at("result", torch.where(i >= j, s, -torch.inf) if hides else s)


def _flex(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, at: Edge, *, cap: bool = False, hides: bool = False) -> Tensor:
    def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return _mod(s, h, i, j, bias, at, cap, hides)

    found: Tensor = flex_attention(q, k, v, score_mod=mod, scale=0.3)
    return found


def _dense(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, at: Edge, *, cap: bool = False, hides: bool = False
) -> Tensor:
    h, i, j = (torch.arange(n).view(shape) for n, shape in ((HEADS, (-1, 1, 1)), (LENGTH, (-1, 1)), (LENGTH, (-1,))))
    return _mod(q @ k.mT * 0.3, h, i, j, bias, at, cap, hides).softmax(-1) @ v


def _visible(i: Tensor, j: Tensor, at: Edge, kind: str) -> Tensor:
    """Who sees whom, of positions of queries and keys."""
    rows, columns = at("rows", 40 * i), at("columns", 40 * j)
    if kind == "window":
        return at("visible", at("difference", rows - columns).abs() < 150)
    if kind == "documents":
        return at("visible", at("of rows", rows // 120) == columns // 120)
    return at("visible", (rows >= columns) & (columns < at("bound", 0 * rows + 250)))


def _masked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, at: Edge, *, kind: str, way: str) -> Tensor:
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    if way == "flex":
        mask = create_block_mask(
            lambda b, h, i, j: _visible(i, j, at, kind), None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=LENGTH
        )
        found: Tensor = flex_attention(q, k, v, block_mask=mask, scale=0.3)
        return found
    visible = _visible(i, j, at, kind)
    if way == "sdpa":
        return F.scaled_dot_product_attention(q, k, v, visible, scale=0.3)
    if way == "by hand":
        return (q @ k.mT * 0.3).masked_fill(~visible, -torch.inf).softmax(-1) @ v
    sees = visible.any(-1, True)  # the output of a query that sees no key is 0
    return (q @ k.mT * 0.3).masked_fill(~visible & sees, -torch.inf).softmax(-1) * sees @ v


def _with(function: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    def form(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, at: Edge) -> Tensor:
        return function(q, k, v, bias, at, **options)

    return form


_EDGES = ("q", "k", "product", "scaled", "scores", "weights", "v", "output")
FORMS: dict[str, Form] = {
    "plain": Form(_by_hand, _EDGES, OPERATORS),
    "wide": Form(_with(_by_hand, wide=True), _EDGES, OPERATORS),
    "capped": Form(_with(_by_hand, cap=True), (*_EDGES, "capped"), OPERATORS),
    "where": Form(_with(_by_hand, mask="where"), _EDGES, OPERATORS),
    "fill": Form(_with(_by_hand, mask="fill", cap=True), (*_EDGES, "capped"), OPERATORS),
    "add": Form(_with(_by_hand, mask="add"), (*_EDGES, "mask"), OPERATORS),
    "biased": Form(_with(_by_hand, biased=True), (*_EDGES, "bias", "biased"), OPERATORS),
    "sink": Form(_with(_by_hand, sink=True), ("q", "k", "product", "scaled", "scores", "v", "sink"), OPERATORS),
    "flat": Form(_flat, ("q", "k", "scores", "weights", "v", "output"), OPERATORS),
    "einsum": Form(_einsum, ("q", "k", "scores", "weights", "v", "output"), OPERATORS),
    "grouped": Form(_grouped, ("q", "k", "scores", "weights", "v", "output"), OPERATORS),
    "sdpa": Form(_sdpa, ("q", "k", "v", "mask", "output"), OPERATORS),
    "math": Form(_with(_sdpa, math=True), ("q", "k", "v", "mask", "output"), OPERATORS),
    **{
        f"{kind} in {way}": Form(
            _with(_masked, kind=kind, way=way), ("visible", "rows", "columns", *extra), INTEGERS,
            None if way == "by hand" else _with(_masked, kind=kind, way="dense"), {"visible": BOOLEANS},
        )
        for kind, extra in (("window", ("difference",)), ("documents", ("of rows",)), ("causal", ("bound",)))
        for way in ("by hand", "sdpa", "flex")
    },
    **{
        name: Form(_with(_flex, **options), ("score", "factor", "sum", "bias", "result", *extra), ELEMENTWISE,
                   _with(_dense, **options))
        for name, options, extra in (("flex", {}, ()), ("flex capped", {"cap": True}, ("capped",)),
                                     ("flex hidden", {"cap": True, "hides": True}, ("capped",)))
    },
}  # fmt: skip
"""Forms of attention; functions by hand, calls of PyTorch's operators, and FlexAttention's score_mod."""
