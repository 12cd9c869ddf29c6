"""Operators that are inserted into accepted forms of attention: each gives a tensor of the size of its argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BATCH, HEADS, LENGTH = 2, 2, 8
"""Sizes of all forms: square planes, and as many heads as batch elements, so that every transposition has a place."""

Operator = Callable[[Tensor], Tensor]
FLOAT8 = tuple(getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name))
DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, *FLOAT8),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


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
    "plus 0": lambda x: x + 0.0,
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
