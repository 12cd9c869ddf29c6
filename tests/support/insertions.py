"""Accepted forms of attention with one foreign operator inserted at one edge: results are the program's, or it is kept.

``python -m tests.support.insertions --cases 20000 --seed 1`` runs many and prints the programs whose numbers are wrong.

A case is a form (`FORMS`), an edge of it, an operator (`OPERATORS`), and the tensors that want gradients.  The compiled
program is compared with eager PyTorch in double precision.  Where it differs, it is compiled without dash_inductor too:
what is wrong there as well is a defect of PyTorch.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import dash_inductor
from dash_inductor.records.records import sites

from .flex import training_on_the_cpu
from .graphs import capture

BATCH, HEADS, LENGTH = 2, 2, 8
"""Sizes of all forms: square planes, and as many heads as batch elements, so that every transposition has a place."""

Edge = Callable[[str, Tensor], Tensor]
Operator = Callable[[Tensor], Tensor]
FLOAT8 = tuple(getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name))
DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, *FLOAT8),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


# ---- operators ----


class _Doubled(torch.autograd.Function):
    """The identity, whose derivative is 2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class _Cut(torch.autograd.Function):
    """The identity, whose derivative cuts gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.05, 0.05)


class _StraightThrough(torch.autograd.Function):
    """Twice its argument, with a derivative of 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 1.0


def _written(write: Callable[[Tensor], Any]) -> Operator:
    def operator(x: Tensor) -> Tensor:
        copy = x.clone()
        write(copy)
        return copy

    return operator


def _first(copy: Tensor) -> None:
    copy[..., 0] = 0.5


def _number(value: float, dtype: torch.dtype, shape: tuple[int, ...]) -> Operator:
    def operator(x: Tensor) -> Tensor:
        factor = torch.full(shape, value, dtype=torch.float32).to(dtype)
        return x * (factor.float() if dtype in FLOAT8 else factor)

    return operator


def _rows(x: Tensor) -> Tensor:
    """A condition of the rows of a plane."""
    return (torch.arange(x.shape[-2]) > 3)[:, None]


def _columns(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-1]) > 3


def _square(x: Tensor) -> bool:
    return x.dim() >= 2 and x.shape[-1] == x.shape[-2]


def _ramp(x: Tensor, dim: int) -> Tensor:
    shape = [1] * x.dim()
    shape[dim] = x.shape[dim]
    return (torch.arange(x.shape[dim], dtype=x.dtype) * 0.25 + 0.5).view(shape)


ELEMENTWISE: dict[str, Operator] = {
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "half detached": lambda x: 0.5 * (x + x.detach()),
    "and detached": lambda x: x + x.detach(),
    "straight through": lambda x: x + (x.round() - x).detach(),
    "three less two": lambda x: 3 * x - (2 * x).detach(),
    "no_grad": _without_gradient,
    "doubled gradient": lambda x: _Doubled.apply(x),
    "cut gradient": lambda x: _Cut.apply(x),
    "own derivative": lambda x: _StraightThrough.apply(x),
    "times 2": lambda x: x * 2.0,
    "over 3": lambda x: x / 3,
    "negative": lambda x: -x,
    "plus 1": lambda x: x + 1.0,
    "times 0": lambda x: x * 0.0,
    "square": lambda x: x * x,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp far": lambda x: x.clamp(-1e4, 1e4),
    "clamp below": lambda x: x.clamp(min=-0.3),
    "round": lambda x: x.round(),
    "floor": lambda x: (4 * x).floor() / 4,
    "abs": lambda x: x.abs(),
    "relu": lambda x: x.relu(),
    "sign": lambda x: x.sign(),
    "root": lambda x: (x.abs() + 0.1).sqrt(),
    "exp": lambda x: (0.1 * x).exp(),
    "sigmoid": lambda x: x.sigmoid(),
    "tanh": lambda x: x.tanh(),
    "capped": lambda x: 3 * torch.tanh(x / 3),
    "nan_to_num": lambda x: x.nan_to_num(),
    "leaky": lambda x: torch.where(x > 0, x, 0.1 * x),
    "where itself": lambda x: torch.where(x > 0, x, x),
    "maximum": lambda x: torch.maximum(x, 0.5 * x),
    "remainder": lambda x: x % 1.5,
    "lerp": lambda x: torch.lerp(x, x * 2, 0.5),
    "mul_": _written(lambda copy: copy.mul_(1.5)),
    "add_": _written(lambda copy: copy.add_(0.5)),
    "copy_ of detached": _written(lambda copy: copy.copy_(copy.detach())),
    **{
        f"to {dtype}": lambda x, dtype=dtype: x.to(dtype).to(x.dtype) for dtype in DTYPES
    },
    **{
        f"times {value} of {dtype} {list(shape)}": _number(value, dtype, shape)
        for value in (2.7, 1.0) for dtype in DTYPES for shape in ((), (1,))
    },
}  # fmt: skip
"""Operators on single numbers."""

ARRAYS: dict[str, Operator] = {
    "contiguous": lambda x: x.contiguous(),
    "bits": lambda x: x.to(torch.bfloat16).view(torch.float16).to(x.dtype).nan_to_num(0.1, 0.1, 0.1).clamp(-2, 2),
    "transposed": lambda x: x.mT if _square(x) else x,
    "transposed in its shape": lambda x: x.mT.reshape(x.shape),
    "batch and heads swapped": lambda x: x.transpose(0, 1) if x.dim() > 3 else x,
    "viewed as another order": lambda x: x.transpose(0, 1).reshape(x.shape) if x.dim() > 3 else x.mT.reshape(x.shape),
    "flip keys": lambda x: x.flip(-1),
    "flip rows": lambda x: x.flip(-2),
    "roll": lambda x: x.roll(1, -1),
    "by index": lambda x: x[..., torch.tensor([1, 0, *range(2, x.shape[-1])])],
    "by its own index": lambda x: x[..., torch.arange(x.shape[-1])],
    "rows of the transposed": lambda x: torch.where(_rows(x), x, x.mT) if _square(x) else x,
    "rows of the swapped": lambda x: torch.where(_rows(x), x, x.transpose(0, 1)) if x.dim() > 3 else x,
    "columns of the transposed": lambda x: torch.where(_columns(x), x, x.mT) if _square(x) else x,
    "rows of twice": lambda x: torch.where(_rows(x), x, 2 * x),
    "rows of itself": lambda x: torch.where(_rows(x), x, x),
    "rows of 0": lambda x: torch.where(_rows(x), x, 0.0),
    "columns of 0": lambda x: torch.where(_columns(x), x, 0.0),
    "columns hidden": lambda x: x.masked_fill(_columns(x), -1e9),
    "cumsum": lambda x: x.cumsum(-1),
    "sorted": lambda x: x.sort(-1).values,
    "softmax": lambda x: x.softmax(-1),
    "softmax over rows": lambda x: x.softmax(-2),
    "log_softmax": lambda x: x.log_softmax(-1),
    "less its mean": lambda x: x - x.mean(-1, True),
    "less its mean over rows": lambda x: x - x.mean(-2, True),
    "less its maximum": lambda x: x - x.amax(-1, True),
    "less its maximum over rows": lambda x: x - x.amax(-2, True),
    "less its own maximum, detached": lambda x: x - x.amax(-1, True).detach(),
    "plus its maximum": lambda x: x + x.amax(-1, True),
    "less its sum": lambda x: x - x.logsumexp(-1, True),
    "normalised": lambda x: F.normalize(x, dim=-1),
    "over its sum": lambda x: x / (x.abs().sum(-1, True) + 1),
    "times a row": lambda x: x * _ramp(x, -2),
    "times a column": lambda x: x * _ramp(x, -1),
    "times a head": lambda x: x * _ramp(x, 1),
    "plus a row": lambda x: x + _ramp(x, -2),
    "plus a column": lambda x: x + _ramp(x, -1),
    "first of it written": _written(_first),
    "a part added to": _written(lambda copy: copy[..., 1:].add_(1)),
    "a part scaled": _written(lambda copy: copy[..., 1:, :].mul_(2)),
    "cat of its parts": lambda x: torch.cat([x[..., :3], x[..., 3:]], -1),
    "cat of swapped parts": lambda x: torch.cat([x[..., 3:], x[..., :3]], -1),
    "padded and cut": lambda x: F.pad(x, (0, 1))[..., :-1],
    "padded in front and cut": lambda x: F.pad(x, (1, 0))[..., :-1],
    "stacked": lambda x: torch.stack([x, 2 * x])[0],
    "unsqueezed": lambda x: x.unsqueeze(1).squeeze(1),
    "einsum": lambda x: torch.einsum("...ij->...ij", x),
    "lower": lambda x: x.tril(),
    "upper": lambda x: x.triu(),
    "gathered": lambda x: x.gather(-1, torch.arange(x.shape[-1]).flip(0).expand(x.shape)),
    "heads mixed": lambda x: (
        torch.einsum("bh...,hg->bg...", x, torch.tensor([[0.7, 0.3], [0.2, 0.8]], dtype=x.dtype)) if x.dim() > 3 else x
    ),
    "dropout of nothing": lambda x: F.dropout(x, 0.0),
    "dropout in evaluation": lambda x: F.dropout(x, 0.3, training=False),
}
"""Operators on tensors of two dimensions or more."""

OPERATORS = ELEMENTWISE | ARRAYS

INTEGERS: dict[str, Operator] = {
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "plus 1": lambda x: x + 1,
    "plus 0.5": lambda x: x + 0.5,
    "times 2": lambda x: x * 2,
    "times 2.7": lambda x: x * 2.7,
    "over 3": lambda x: x / 3,
    "over 3, rounded down": lambda x: x // 3,
    "over 3, cut": lambda x: torch.div(x, 3, rounding_mode="trunc"),
    "remainder": lambda x: x % 7,
    "fmod": lambda x: torch.fmod(x, 7),
    "abs": lambda x: x.abs(),
    "negative": lambda x: -x,
    "clamp": lambda x: x.clamp(-50, 100),
    "maximum": lambda x: torch.maximum(x, x // 2),
    "where": lambda x: torch.where(x > 100, x, 2 * x),
    "square": lambda x: x * x,
    "shifted": lambda x: x << 2,
    "and": lambda x: x & 63,
    "xor": lambda x: x ^ 3,
    "add_": _written(lambda copy: copy.add_(3)),
    "flip": lambda x: x.flip(-1),
    "sign": lambda x: x.sign(),
    "sin": lambda x: (x * 0.01).sin() * 300,
    **{
        f"to {dtype}": lambda x, dtype=dtype: x.to(dtype).to(torch.float32 if dtype in FLOAT8 else dtype)
        for dtype in DTYPES if dtype is not torch.bool
    },
    **{f"to {dtype} and back": lambda x, dtype=dtype: x.to(dtype).to(x.dtype) for dtype in DTYPES},
    **{
        f"plus 100 of {dtype}": lambda x, dtype=dtype: x.to(dtype) + torch.full((), 100, dtype=dtype)
        for dtype in DTYPES if dtype is not torch.bool and dtype not in FLOAT8
    },
}  # fmt: skip
"""Operators on the numbers of which a mask is made, multiples of 40: they do not fit small dtypes."""

BOOLEANS: dict[str, Operator] = {
    "clone": lambda x: x.clone(),
    "not": lambda x: ~x,
    "not not": lambda x: ~~x,
    "and itself": lambda x: x & x,
    "flipped": lambda x: x.flip(-1),
    "transposed": lambda x: x.mT if _square(x) else x,
    "or the diagonal": lambda x: x | torch.eye(LENGTH, dtype=torch.bool),
    "xor": lambda x: x ^ x.flip(-1),
    "a row written": _written(lambda copy: copy[..., 2:3, :].fill_(True)),
    **{f"to {dtype}": lambda x, dtype=dtype: x.to(dtype).to(torch.bool) for dtype in DTYPES},
    **{f"sum in {dtype}": lambda x, dtype=dtype: (x.to(dtype) + x.to(dtype)) > 1 for dtype in (torch.int8, torch.half)},
}
"""Operators on a mask of booleans."""


# ---- forms ----


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

WANTED = {"all": (0, 1, 2, 3), "none": (), "value": (2,), "query": (0,), "query and key": (0, 1), "bias": (3,)}
"""Which of query, key, value and bias want gradients."""


@dataclass(frozen=True)
class Case:
    """One program: a form with an operator at an edge, which tensors want gradients, and the dtype of all of them."""

    form: str
    edge: str
    operator: str
    wanted: str
    dtype: str = "float32"

    def function(self, *, reference: bool = False) -> Callable[..., Tensor]:
        form, operator = FORMS[self.form], FORMS[self.form].inserted(self.edge)[self.operator]
        function = form.reference or form.function if reference else form.function
        edge = self.edge

        def at(name: str, x: Tensor) -> Tensor:
            return operator(x) if name == edge else x

        def program(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            return function(q, k, v, bias, at)

        return program


def cases() -> Iterator[Case]:
    """Every case."""
    for name, form in FORMS.items():
        for edge, wanted in itertools.product(form.edges, WANTED):
            for operator in form.inserted(edge):
                if operator != "columns hidden" or edge in _SCORES:
                    yield from (Case(name, edge, operator, wanted, dtype) for dtype in ROUNDING)


ROUNDING = {"float32": (2e-5, 1e-2), "bfloat16": (8e-3, 0.3)}
"""By dtype: an error that is allowed beside four times that of eager, and a bound from which on nothing is compared."""
_SCORES = ("product", "scaled", "capped", "biased", "scores")
"""Edges at which numbers may be hidden: elsewhere results depend on how numbers of 1e9 are rounded."""


def sample(count: int, seed: int) -> list[Case]:
    """So many cases, each at most once, which a seed draws."""
    every = list(cases())
    return random.Random(seed).sample(every, min(count, len(every)))


# ---- outcomes ----


def tensors(wanted: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and bias, of which some want gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, HEADS, LENGTH, LENGTH)] * 3 + [(HEADS, LENGTH, LENGTH)]
    found = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [x.requires_grad_(number in wanted) for number, x in enumerate(found)]


Results = list[Tensor | None]


def results(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Results:
    """The output, and the gradients of all inputs that want one; None for those that get none."""
    output = function(*inputs)
    found: Results = [output.detach()]
    wanting = [x for x in inputs if x.requires_grad]
    if output.requires_grad and wanting:
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
        return [*found, *torch.autograd.grad(output, wanting, weights, allow_unused=True)]
    return [*found, *(None for _ in wanting)]


def error_of(found: Results, exact: Results) -> float:
    """The largest difference, relative to the largest number; infinite for other shapes or numbers that are not finite
    elsewhere.
    """
    errors = [0.0]
    for ours, true in zip(found, exact, strict=True):
        if ours is None or true is None:
            rest = true if ours is None else ours
            errors.append(0.0 if rest is None or not rest.any() else torch.inf)
            continue
        if ours.shape != true.shape or (ours.isfinite() != true.isfinite()).any():
            return torch.inf
        difference = torch.where(true.isfinite(), ours.double() - true, 0.0).abs().max()
        errors.append(float(difference / (1 + true.nan_to_num(0, 0, 0).abs().max())))
    return max(errors)


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
        kind: "replaced"; "kept"; "no record"; "no numbers" where eager's own error is larger than what is looked for;
            "wrong"; "both wrong" where PyTorch alone is wrong as well.
        detail: errors and records.
    """

    kind: str
    detail: str = ""


def _run(case: Case, inputs: Sequence[Tensor]) -> Results | Exception:
    with capture() as graphs:
        try:
            return results(graphs.compile(case.function()), inputs)
        except Exception as raised:
            return raised


def outcome(case: Case) -> Outcome:
    """Compile a case and compare it."""
    inputs = tensors(WANTED[case.wanted], getattr(torch, case.dtype))
    allowed, largest = ROUNDING[case.dtype]
    exact_inputs = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    with training_on_the_cpu():
        ours = _run(case, inputs)
        records = list(sites())
        try:
            exact = results(case.function(reference=True), exact_inputs)
            eager = results(case.function(reference=True), inputs)
        except Exception as raised:
            return Outcome("kept", f"eager raises {type(raised).__name__}")
        bound = 4 * error_of(eager, exact) + allowed
        if bound > largest or any(x is not None and x.isnan().any() for x in exact):
            return Outcome("no numbers")
        status = {record.status for record in records}
        kind = "no record" if not records else "replaced" if status == {"replaced"} else "kept"
        if not isinstance(ours, Exception) and error_of(ours, exact) <= bound:
            return Outcome(kind)
        with dash_inductor.disabled():
            plain = _run(case, inputs)
    words = [f"{r.status} {r.reason.value if r.reason else ''} {r.detail}" for r in records]
    found = ours if isinstance(ours, Exception) else error_of(ours, exact)
    alone = plain if isinstance(plain, Exception) else error_of(plain, exact)
    text = f"{found!r}"[:300] + f" where PyTorch has {alone!r}"[:300] + f"; eager {bound}; {words}"
    same = type(ours) is type(plain) if isinstance(ours, Exception) else not isinstance(alone, float) or alone > bound
    return Outcome("both wrong" if same else "wrong", text)


def run(found: Sequence[Case]) -> tuple[Counter[str], list[tuple[Case, str]]]:
    """How often each outcome occurs, and the cases that are wrong."""
    kinds, wrong = Counter[str](), list[tuple[Case, str]]()
    for case in found:
        result = outcome(case)
        kinds[result.kind] += 1
        if result.kind == "wrong":
            wrong.append((case, result.detail))
    return kinds, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--form", default="")
    parser.add_argument("--only", default="", help="FORM/EDGE/OPERATOR/WANTED of a single case")
    options = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.only:
        print(outcome(Case(*options.only.split("/"))))
        return 0
    chosen = [case for case in sample(1 << 30, options.seed) if options.form in case.form][: options.cases]
    kinds: Counter[str] = Counter()
    for number, case in enumerate(chosen, 1):
        found = outcome(case)
        kinds[found.kind] += 1
        if found.kind in ("wrong", "no record") or (found.kind == "both wrong" and "Error" not in found.detail):
            print(f"{found.kind}: {case}: {found.detail}"[:900], flush=True)
        if number % 500 == 0:
            print(number, dict(kinds), flush=True)
    print(dict(kinds))
    return int(kinds["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
